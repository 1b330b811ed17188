"""What can only be seen on a GPU; see __main__.py."""
