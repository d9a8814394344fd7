"""A model of the contract's record, and a machine that drives it and the real scripts together.

`record_model.py` is the table of transitions as plain values: no Redis, no clock. `test_record_model.py` lets hypothesis choose
who does what when, on the real server, and compares reply and state after each step.
"""
