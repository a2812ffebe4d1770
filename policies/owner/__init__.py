"""Who keeps a request alive from its submission to its last token: the decisions of a gateway's owner."""
