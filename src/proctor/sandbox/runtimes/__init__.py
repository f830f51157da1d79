"""Runtimes: the ways of running a sandbox behind one seam, each in a module of its own.

An Edge admits, journals, keeps clocks and buries; a *runtime* turns an `Order` into a running guest and says what it
can do (`contract.RuntimeDriver`). A new one is one module here and one line in `registry`. See docs/design/runtimes.md.
"""
