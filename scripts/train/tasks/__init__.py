"""What is trained: a module a task."""
