"""The statistician: aggregates, comparisons, failure cards, reports. Everything starts from a trials frame."""
