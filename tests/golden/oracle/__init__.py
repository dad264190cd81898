"""Makes tiny random checkpoints and their expected outputs; see ../README.md."""
