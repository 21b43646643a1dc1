"""Damaged and hostile files, made by the thousand: whatever is in them, reading ends in success or in one line.

``python -m tests.fuzz --minutes 10 --seed 1`` runs all formats by turns, damaged caches and killed runs too, and says
how many cases of which it tried. A case is a function of format, seed and number, so that ``--only zip --seed 1 --first
4711 --cases 1`` makes it again. One that fails is written to ``kept/``, and every test run tries it again.

A format is a :class:`~tests.fuzz.formats.Format`: valid files to begin with, a function that reads one, and one that
spoils it. A module of them is added to ``MODULES`` in ``tests/fuzz/formats.py``.
"""
