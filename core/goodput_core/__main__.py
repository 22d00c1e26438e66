"""`python -m goodput_core`: the `goodput` command of exactly this interpreter."""

from goodput_core.entry import main

main()
