"""A report that people want to read: one HTML file without network, and the same as Markdown, JSON, CSV and JUnit."""
