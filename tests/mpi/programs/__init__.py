"""What runs on the ranks. Each module holds checks (see ``registry``) or whole scripts."""
