"""A model of the contract's record, and a machine that drives it and the real scripts together.

`record_model.py` is the table of transitions as plain values: no Redis, no clock. In `machine.py` hypothesis chooses
who does what when, on the real server (`world.py`), and reply and state are compared after each step.
"""
