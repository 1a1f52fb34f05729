"""This room remembers what GPUs and pods did during the last day: kept in a bounded ring, on disk if asked, and told as
series.

`columns.py` packs the figures of one moment, `rows.py` says which place in it is whose, `spans.py` keeps who held what
and what was wrong from when to when; `ring.py` is all of it in memory. `keeper.py` takes a sample every 15 s and has it
written: `journal.py` says what, `frames.py` how, `directory.py` where. `asking.py` is what is asked, `answering.py`
answers from the ring, and `telling.py` makes the JSON of `/api/v1/history` (docs/api.md), whoever kept the figures.
"""
