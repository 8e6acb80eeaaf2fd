"""The module that the template process imports first: `multiprocessing`'s fork server knows modules by name alone."""

from melld.engine.worker.forking import prepare

prepare()
