# ruff: noqa
# mypy: ignore-errors
"""First code of a test process in the clean room. Python 3.6 to 3.14, standard library only.

Started as `python -S -s entry.py` so that nothing of the graded tree runs before the channel is taken:
no site-packages, no .pth line, no sitecustomize. Reads its configuration from standard input, takes the report
descriptor, hides it, and only then lets the environment in and hands over to the runner.
"""

import os
import sys


class Channel(object):
    """Writes frames `<mac> <canonical json>\\n`. Each mac covers the one before it, so order and number are bound."""

    __slots__ = ("send",)

    def __init__(self, fd, nonce, prefix=""):
        import fcntl
        import hashlib
        import hmac
        import json
        import random
        import resource

        limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 65536)
        low = random.SystemRandom().randrange(min(256, limit // 2), max(limit - 64, limit // 2 + 1))
        hidden = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, low)
        os.close(fd)
        state = {"mac": b"", "seq": 0, "pid": os.getpid(), "key": nonce}
        write, getpid = os.write, os.getpid
        new, sha, encode = hmac.new, hashlib.sha256, json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode

        def send(kind, **fields):
            # A forked child that runs on into our code must not report in the parent's name.
            if getpid() != state["pid"]:
                return
            fields["t"] = kind
            fields["seq"] = state["seq"]
            body = encode(fields).encode("ascii")
            mac = new(state["key"], state["mac"] + body, sha).hexdigest().encode("ascii")
            state["mac"], state["seq"] = mac, state["seq"] + 1
            data = prefix.encode("ascii") + mac + b" " + body + b"\n"
            while data:
                data = data[write(hidden, data) :]

        self.send = send


def read_config():
    """The whole of standard input, which is then closed: descriptor 0 becomes /dev/null."""
    import json

    chunks = []
    while True:
        chunk = os.read(0, 65536)
        if not chunk:
            break
        chunks.append(chunk)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if null:
        os.close(null)
    return json.loads(b"".join(chunks).decode("utf-8"))


def admit_environment(config, need):
    """Let site-packages and .pth files in, but no sitecustomize; then the variables that -S start-up must not see.

    `need` names modules that are loaded before the working directory can stand in for them. One that is not
    there yet (found through PYTHONPATH) is loaded later, as `python -m` would.
    """
    toolkit = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != toolkit]
    os.environ.update(config["python_env"])
    for name in ("sitecustomize", "usercustomize"):
        sys.modules[name] = None
    import importlib
    import site

    site.main()
    for name in ("sitecustomize", "usercustomize"):
        sys.modules.pop(name, None)
    for name in need:
        try:
            importlib.import_module(name)
        except ImportError:
            pass
    extra = [os.path.abspath(p) for p in config["python_env"].get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:0] = extra
    if config["path0"] is not None:
        sys.path.insert(0, config["path0"])


def load(name):
    """A module of this toolkit, loaded by file and left out of sys.modules."""
    import importlib.util

    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name + ".py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    config = read_config()
    os.dup2(1, 2)
    channel = Channel(config["fd"], bytes(bytearray.fromhex(config.pop("nonce"))))
    runner = load("run_" + config["runner"])
    runner.decoys = load("decoys")
    channel.send("start", runner=config["runner"], python="%d.%d.%d" % sys.version_info[:3])
    os.chdir(config["cwd"])
    sys.argv[:] = config["argv"]
    admit_environment(config, getattr(runner, "NEED", ()))
    code = 1
    try:
        code = runner.run(config, channel.send)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else (0 if exit_.code is None else 1)
    finally:
        channel.send("end", code=int(code) if isinstance(code, int) else 1)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


if __name__ == "__main__":
    main()
