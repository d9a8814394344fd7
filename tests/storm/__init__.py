"""A seeded fault run against the real program, and the judge that reads its logs afterwards.

    python -m storm --seed 7 --seconds 60       (or `make storm ARGS="--seed 7 --seconds 600"`)

`history.py` says what is logged, `judge.py` what must be true of it: pure, and written before all the rest.
"""
