"""A module that takes as long to import as a large library on a busy machine."""

import time

time.sleep(10)
