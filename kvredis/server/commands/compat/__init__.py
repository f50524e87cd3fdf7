"""What Redis has and a block store seldom meets: LCS, DUMP and RESTORE with their formats, long doubles, DEBUG. No
hot path imports it."""
