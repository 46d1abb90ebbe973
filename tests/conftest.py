"""One thread for every test: tiny networks are slower on more, and twenty times slower when tests run side by side."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
