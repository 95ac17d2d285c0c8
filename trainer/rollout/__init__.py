"""From tasks to groups that are waiting to be trained on."""
