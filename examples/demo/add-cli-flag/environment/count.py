#!/usr/bin/env python3
"""Count lines, words and bytes of files."""

import argparse


def count(path):
    with open(path, "rb") as file:
        data = file.read()
    return data.count(b"\n"), len(data.split()), len(data)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE")
    arguments = parser.parse_args()
    for path in arguments.files:
        lines, words, size = count(path)
        print(f"{lines}\t{words}\t{size}\t{path}")


if __name__ == "__main__":
    main()
