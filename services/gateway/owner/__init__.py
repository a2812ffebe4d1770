"""The owner of every request in progress: its stream, its worker, its text, from the submission to the last token."""
