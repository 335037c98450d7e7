"""A generated help desk with tools: cases, database, tools, environment."""
