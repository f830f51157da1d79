import pathlib
import sys

EXPECTED = {
    "2024/01/IMG_20240131_0007.jpg": "photo a\n",
    "2024/01/IMG_20240131_0007-1.jpg": "photo c\n",
    "2024/02/IMG_20240201_0001.jpg": "photo b\n",
    "2024/02/IMG_20240215_0042.jpg": "photo e\n",
    "2023/12/IMG_20231225_0100.jpg": "photo d\n",
}
root = pathlib.Path("/app/sorted")
found = {str(p.relative_to(root)): p.read_text() for p in root.rglob("*") if p.is_file() and not p.is_symlink()}
sys.exit(found != EXPECTED)
