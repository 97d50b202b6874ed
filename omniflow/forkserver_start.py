"""Imported once, by the fork server that host processes come from, before it forks any: it dies with its parent too.

Without this, the hosts' own tie (to the fork server) would not fire after `kill -9` of the main process, because each
of them keeps the fork server's life line open.
"""

import gc
import os
import signal

from omniflow.prctl import PARENT, die_with_parent

# The supervisor says whose child this is: were that dead already, the parent of this process would be another one.
parent = os.environ.pop(PARENT, "")
if not parent:
    # The one before died as a thread was to start a host by it, which has started this: it would die with that thread.
    os._exit(1)
die_with_parent(int(parent))
# A SIGTERM for the whole process group is the runtime's to act on: it drains, with its hosts alive.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
# All that is imported next stays. To look for garbage among it took 0.6 s of the 6.9 until `omniflow run` was ready.
gc.set_threshold(1_000_000)
