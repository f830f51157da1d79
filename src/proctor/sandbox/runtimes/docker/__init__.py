"""Runtime `docker`: sandboxes as containers of a Docker Engine on this machine, for where that is all there is.

The guest is put in read-only and attached over the Engine API; nothing listens, nothing is published, no `docker`
program is executed. See docs/design/runtimes.md.
"""
