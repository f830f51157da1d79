# Aliases for the scripts, nothing more.
.PHONY: setup demo test check bench
setup demo test check:
	scripts/$@
bench:
	scripts/bench
