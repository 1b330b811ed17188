"""Options, messages and progress bars shared by commands."""
