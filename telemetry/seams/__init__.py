"""What is patched in torch and in other libraries, and the private names that are read there: see `table`."""
