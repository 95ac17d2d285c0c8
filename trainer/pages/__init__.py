"""What people look at: the report and the live page."""
