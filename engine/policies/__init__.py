"""Scheduling policies: in which order waiting requests are admitted, and who gives way when there is no room.

A policy of one's own implements `base.Policy` and is given to `EngineCore`; those that ship are made by `make.py`.
"""
