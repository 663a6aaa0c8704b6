"""What becomes of a lost device's memory: nothing, as torch cannot free all of it.

Pinned memory goes back to torch's pool with an event on every stream that has copied from or to it. That is recorded
where the memory is freed, in a destructor, which ends the process when CUDA refuses: a service that has an engine of a
lost device among other things would end with it.
"""

from __future__ import annotations

import ctypes

__all__ = ["abandon"]


def abandon(owner: object) -> None:
    """Never free `owner` and what it refers to, not even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
