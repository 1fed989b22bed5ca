"""Gates: which experts a token goes to, with which weight. One file per paper."""
