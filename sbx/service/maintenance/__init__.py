"""Check, back up, restore and repair the store of a data directory, for an operator.

    place.py    as whom, and whether the service runs
    check.py    the store, and whether its rows and the directories on the disk match
    backup.py   a copy while the service runs; another store in the place of the present one
    repair.py   a new store from the rows of a damaged one
    salvage.py  reads those rows

Everything here is synchronous, for a command. What changes the store needs the lock of the data
directory, which a service holds. The present store is always kept, under a name with the time.
May import: `sbx.store`, `sbx.runtime.data_dir`, and everything below the runtime.
"""
