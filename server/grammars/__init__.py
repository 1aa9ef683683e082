"""Makes grammars of schemas, expressions and tags, which hold answers to a form."""
