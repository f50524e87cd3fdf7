"""Whether the extensions in C may be used: each has a way in Python behind the same function, for where there are none.

KVREDIS_NATIVE=0 in the environment turns them off, for a comparison or should one be suspected of a fault.
"""

import os
from typing import Final

NATIVE_WANTED: Final = os.environ.get("KVREDIS_NATIVE") != "0"
