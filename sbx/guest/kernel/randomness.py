"""New random state after a fork."""

import os
import sys
from collections.abc import Mapping
from typing import Any


def renew() -> None:
    """Replace random state of the parent, which must not be the same in two of its forks.

    Python itself seeds `random` again at every fork. OpenSSL notices the changed pid of its
    process. `secrets`, `uuid` and numpy's new generators ask Linux each time.
    """
    loaded: Mapping[str, Any] = sys.modules
    if "numpy.random" in loaded:
        numpy = loaded["numpy"]  # not seed(), which copies twice the pages and takes twice the time
        state = numpy.frombuffer(os.urandom(2496), numpy.uint32)
        numpy.random.set_state(("MT19937", state, 624))
    if "multiprocessing.process" in loaded:
        loaded["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "tempfile" in loaded:
        loaded["tempfile"]._name_sequence = None
    if "uuid" in loaded:
        uuid = loaded["uuid"]
        uuid._node, uuid._last_timestamp = uuid._random_getnode(), None
        uuid._generate_time_safe = None  # libuuid keeps its own node and clock sequence
