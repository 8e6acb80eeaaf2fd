"""Imported by the template process after what workers need: has them be those of `costless`."""

from benchmarks.serving import costless
from melld.engine.worker import main as worker

worker.main = costless.main
