"""What runs on the training thread: the patches of torch and other libraries, see `table`, and the ring they fill."""
