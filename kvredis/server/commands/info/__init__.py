"""INFO and its sections, and what the operating system says of this process. Commands that report the same figures
import it."""
