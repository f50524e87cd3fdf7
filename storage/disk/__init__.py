"""The disk tier: records in segment files, and the index that says where each one lies. The tiering manager and the
store import it; it knows no memory tier."""
