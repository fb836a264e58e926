"""Mistakes of a new user, command by command: one line with the problem, the value and the remedy; no traceback.

Each case runs in this process inside one folder of odd files. Those that need torch, or another user, are processes.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile

import pytest
from PIL import Image

from ls_edge.runtime.transport.keys import new_keys

PEER = "  - {{name: {name}, address: 'tcp://127.0.0.1:{port}', blocks: {blocks}{more}}}\n"


def peers_yaml(*peers, top=""):
    return top + "peers:\n" + "".join(peers)


def peer(name="a", port=47001, blocks="[0, 1, 2, 3]", more=""):
    return PEER.format(name=name, port=port, blocks=blocks, more=f", {more}" if more else "")


TEXTS = {
    "file.txt": "hello\n",
    "empty.yaml": "",
    "list.yaml": "- a\n- b\n",
    "good.yaml": peers_yaml(peer()),
    "tabs.yaml": "peers:\n\t- name: a\n",
    "open.yaml": "peers: [a\n",
    "twice.yaml": peers_yaml(peer(more="name: b")),
    "bom.yaml": "\ufeff" + peers_yaml(peer(blocks="x")),
    "crlf.yaml": peers_yaml(peer(blocks="x")).replace("\n", "\r\n"),
    "none.yaml": "peers: []\n",
    "noaddress.yaml": "peers:\n  - {name: a, blocks: [0]}\n",
    "unknown.yaml": peers_yaml(peer(more="thread: 1")),
    "port.yaml": peers_yaml(peer(port=99999)),
    "noport.yaml": "peers:\n  - {name: a, address: 'tcp://127.0.0.1', blocks: [0]}\n",
    "samename.yaml": peers_yaml(peer(), peer(port=47002)),
    "sameport.yaml": peers_yaml(peer(), peer("b")),
    "far.yaml": "peers:\n  - {name: a, address: 'tcp://10.0.0.1:5555', blocks: [0]}\n",
    "beyond.yaml": peers_yaml(peer(blocks='"0-9"')),
    "backwards.yaml": peers_yaml(peer(blocks='"3-1"')),
    "huge.yaml": peers_yaml(peer(more=f"threads: {2**70}")),
    "nan.yaml": peers_yaml(peer(), top="heartbeat: {slowest_mbit: .nan}\n"),
    "codec.yaml": peers_yaml(peer(more="codec: gzip")),
    "engine.yaml": peers_yaml(peer(more="engine: cuda")),
    "boolname.yaml": peers_yaml(peer(name="yes")),
    "oddname.yaml": peers_yaml(peer(name="'a b'")),
    "badkey.yaml": peers_yaml(peer(more="public_key: short")),
    "heartbeat.yaml": peers_yaml(peer(), top="heartbeat: {interval_ms: 1}\n"),
    "python.yaml": "peers: !!python/object/apply:os.system ['true']\n",
    "deep.yaml": "peers: " + "[" * 500 + "]" * 500 + "\n",
    "control.yaml": peers_yaml(peer(name='"\\e[2Jx"')),
    "config.yaml": "epochs: many\n",
    "lr.yaml": "optim: {lr: .nan}\n",
    "unknownkey.yaml": "epoch: 3\n",
}


def picture(path, size=(16, 16)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (120, 30, 60)).save(path)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory, make_bundle):
    """The folder of everything that is odd; the commands run in it."""
    top = tmp_path_factory.mktemp("zoo")
    for name, text in TEXTS.items():
        (top / name).write_text(text, encoding="utf-8", newline="")
    (top / "latin1.yaml").write_bytes("peers: [ä]".encode("latin-1"))
    (top / "binary.yaml").write_bytes(bytes(range(256)))
    (top / "empty").mkdir()
    good = make_bundle(top / "bundle")
    for name in ("cut", "missing", "foreign", "newer", "nothing", "folder", "wrong", "inside", "types", "evil"):
        shutil.copytree(good, top / name)
    other = make_bundle(top / "other", seed=1)
    (top / "cut" / "stem.onnx").write_bytes((good / "stem.onnx").read_bytes()[:100])
    (top / "missing" / "blocks" / "02.onnx").unlink()
    shutil.copy(other / "blocks" / "01.onnx", top / "foreign" / "blocks" / "01.onnx")
    edit(top / "newer", schema=7)
    (top / "nothing" / "manifest.json").write_text("")
    (top / "folder" / "manifest.json").unlink()
    (top / "folder" / "manifest.json").mkdir()
    edit(top / "wrong", precision="fp16")
    edit(top / "types", opset="twenty")
    edit(top / "evil", schema="\x1b[2J\x07")
    manifest = json.loads((top / "inside" / "manifest.json").read_text())
    manifest["parts"]["stem"]["file"] = "../../../etc/passwd"
    (top / "inside" / "manifest.json").write_text(json.dumps(manifest))
    (top / "run").mkdir()
    (top / "run" / "config.yaml").write_text("epochs: many\n")
    (top / "run" / "model.safetensors").write_bytes(b"")
    for number in range(10):
        picture(top / "images" / str(number) / "a.png")
    picture(top / "others" / "cat" / "a.png")
    picture(top / "flat" / "a.png")
    with tarfile.open(top / "whole.tar", "w") as archive:
        archive.add(top / "images", "images")
    (top / "cut.tar").write_bytes((top / "whole.tar").read_bytes()[:3000])
    new_keys("k", top)
    (top / "public.key_secret").write_bytes((top / "k.key").read_bytes())
    (top / "garbage.key_secret").write_bytes(b"\x00\xff")
    (top / "open.key_secret").write_bytes((top / "k.key_secret").read_bytes())
    os.chmod(top / "public.key_secret", 0o600)
    os.chmod(top / "garbage.key_secret", 0o600)
    os.chmod(top / "open.key_secret", 0o644)
    keys = [new_keys(name, top)[0].public.decode() for name in ("a", "s")]
    text = f"sources:\n  - {{name: s, public_key: '{keys[1]}'}}\n" + peers_yaml(peer(more=f"public_key: '{keys[0]}'"))
    (top / "keyed.yaml").write_text(text)
    return top


def edit(folder, **fields):
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


SHORT = {
    "EVAL": "eval bundle --data digits",
    "ANALYZE": "analyze bundle --data digits",
    "PEER": "peer --name a --bundle bundle --peers",
    "RUN": "run --peers good.yaml --bundle bundle --data digits",
    "TRAIN": "train --data digits --out new",
}
CASES = r"""
2 | eval | Missing argument 'RUN_OR_BUNDLE...'
2 | eval bundle | Missing option '--data'
1 | eval nowhere --data digits | nowhere is neither a run (config.yaml) nor a bundle (manifest.json), nor a
1 | eval empty --data digits | empty is neither a run (config.yaml) nor a bundle (manifest.json), nor a
1 | eval bundle/manifest.json --data digits | bundle/manifest.json is a file; give the folder of a run (config.yaml)
1 | eval bundle --data nowhere | nowhere: no such folder or tar; check the path, or write 'digits' for the
1 | eval bundle --data empty | empty holds no images; expected class folders with files ending in .bmp,
1 | eval bundle --data file.txt | file.txt is neither a folder nor a whole tar (truncated header); check it or
1 | eval bundle --data flat | flat has images but no class folders, so there is no accuracy to measure; put
1 | eval bundle --data others | others: the model has no class 'cat'; its classes are '0',
1 | eval bundle --data cut.tar | cut.tar is neither a folder nor a whole tar (truncated header); check it or
2 | EVAL --orders 0 | '--orders': 0 is not in the range 1<=x<=100000
2 | EVAL --orders many | '--orders': 'many' is not a valid integer range
2 | EVAL --orders 2**70 | '--orders': 2**70 is not in the range 1<=x<=100000
2 | EVAL --limit 0 | '--limit': 0 is not in the range 1<=x<=10000000
2 | EVAL --limit 10 --keep 9 | keep 9 is not possible; give 1 to 4, the number of blocks of the model
2 | EVAL --limit 10 --keep a,b | '--keep': 'a,b' is not a list of numbers such as 1,4
2 | EVAL --limit 10 --keep -1 | '--keep': '-1': use numbers from 1 to 10000
2 | EVAL --limit 10 --seed -1 | '--seed': -1 is not in the range 0<=x<=2147483647
2 | EVAL --seed 2**70 | '--seed': 2**70 is not in the range 0<=x<=2147483647
2 | EVAL --device gpu | '--device': 'gpu' is not one of 'auto', 'cpu', 'cuda'
2 | EVAL --figure empty | cannot write empty: it is a folder; name a file
1 | analyze cut --data digits | cut/stem.onnx (stem) is not the file of this bundle: it has
2 | analyze | Missing argument 'RUN_OR_BUNDLE...'
2 | analyze --run bundle | RUN_OR_BUNDLE... is an argument of this command; write it without '--run'; see
2 | analyze bundle | Missing option '--data'
2 | ANALYZE --what magic | --what 'magic' is not a kind of analysis; use importance, contribution,
2 | ANALYZE --bands 0/2 | bands 0/2: expected block 1, found block 2; list each block once, with
2 | ANALYZE --report empty | cannot write empty: it is a folder; name a file
2 | EVAL --jsn | unknown option '--jsn'; did you mean '--json'? See
1 | eval cut --data digits | cut/stem.onnx (stem) is not the file of this bundle: it has
1 | eval newer --data digits | newer/manifest.json has schema 7, not 2: made by a newer ls-edge; export again
1 | eval folder --data digits | folder is neither a run (config.yaml) nor a bundle (manifest.json), nor a
1 | eval evil --data digits | evil/manifest.json has schema '\x1b[2J\x07', not 2: made by an older ls-edge;
2 | eval bundle digits | Missing option '--data'
2 | verify | Missing argument 'BUNDLE'
1 | verify nowhere | nowhere is not a bundle: it has no manifest.json; write one with 'ls-edge export
1 | verify file.txt | file.txt is a file; give the folder of the bundle, which holds manifest.json
1 | verify cut | cut: 1 of 6 parts are wrong: cut/stem.onnx (stem) is not the file of this
1 | verify missing | missing: 1 of 6 parts are wrong: missing/blocks/02.onnx (block 2) is missing;
1 | verify foreign | foreign: 1 of 6 parts are wrong: foreign/blocks/01.onnx (block 1) is not the
1 | verify newer | newer/manifest.json has schema 7, not 2: made by a newer ls-edge; export again
1 | verify nothing | nothing/manifest.json:1:1: not JSON, expecting value; copy the
1 | verify folder | cannot read folder/manifest.json: Is a directory; check the path and its
1 | verify wrong | wrong/manifest.json was changed: bundle_id is
1 | verify types | types/manifest.json: opset is 'twenty'; it has to be a whole number;
1 | verify inside | inside/manifest.json: the file of stem is '../../../etc/passwd'; a bundle
1 | verify bundle --run nowhere | nowhere is not a run: it has no config.yaml; make one with 'ls-edge train --data DATA
2 | verify bundle --data digits | --data compares with PyTorch and needs --run RUN as well
2 | verify bundle bundle | Got unexpected extra argument (bundle)
2 | bench | name the folder of a bundle, or a running peer with --peers FILE --name NAME
1 | bench cut | cut/stem.onnx (stem) is not the file of this bundle: it has
2 | bench --bundle bundle | BUNDLE is an argument of this command; write it without '--bundle'; see
2 | bench bundle --threads 0 | '--threads': 0 is not in the range 1<=x<=1024
2 | bench bundle --duration 0.1 --batch 0 | '--batch': '0': use numbers from 1 to 1024
2 | bench bundle --duration 0 | '--duration': 0.0 is not in the range 0<x<=1000000
2 | bench bundle --duration nan | '--duration': nan is not a finite number
2 | bench bundle --engine cuda | '--engine': 'cuda' is not one of 'auto', 'onnx', 'tensorrt'
2 | keys new | Missing argument 'NAME'
2 | keys old | unknown command 'old'; known here: new
2 | keys new a/b | name 'a/b': use 1 to 63 letters, digits, dots, hyphens or underscores, a
2 | keys new a b | Got unexpected extra argument (b)
2 | keys new k | k.key exists and is not overwritten; choose another --out, or remove
2 | keys new z --out file.txt | '--out': Directory 'file.txt' is a file
2 | keys new z --out /dev/full | cannot write /dev/full: /dev/full is not a folder; give another path
2 | keys new '' | name '': use 1 to 63 letters, digits, dots, hyphens or underscores, a letter
2 | keys new -x | unknown option '-x'; remove it
2 | peer | Missing option '--peers'
2 | peer --peers good.yaml | Missing option '--name'
2 | peer --name a --peers good.yaml | give either --bundle FOLDER, or --store FOLDER
2 | peer --name x --bundle bundle --peers good.yaml | good.yaml: unknown peer 'x'; known here: a
1 | peer --name a --bundle nowhere --peers good.yaml | nowhere is not a bundle: it has no manifest.json; write one with
2 | peer --name a --bundle good.yaml --peers bundle | bundle: cannot be read: Is a directory; check the path
2 | PEER nowhere.yaml | nowhere.yaml: cannot be read: No such file or
2 | PEER empty | empty: cannot be read: Is a directory; check the path
2 | PEER empty.yaml | empty.yaml: the file is empty: the key 'peers' is missing here; add it
2 | PEER list.yaml | list.yaml:1:1: the file is ['a', 'b']; it has to be a group of keys (peers,
2 | PEER tabs.yaml | tabs.yaml:2:1: not YAML: a line is indented with a tab; use spaces
2 | PEER open.yaml | open.yaml:2:1: not YAML: did not find expected ',' or ']'
2 | PEER twice.yaml | twice.yaml:2:71: the key 'name' occurs twice; keep one
2 | PEER bom.yaml | bom.yaml:2:57: blocks is 'x'; list at least one number, each once,
2 | PEER crlf.yaml | crlf.yaml:2:57: blocks is 'x'; list at least one number, each once,
2 | PEER none.yaml | none.yaml:1:8: peers is []; it has to be a list of 1 to 1024 peers
2 | PEER noaddress.yaml | noaddress.yaml:2:5: the key 'address' is missing here; add it
2 | PEER unknown.yaml | unknown.yaml:2:71: unknown key 'thread'; did you mean 'threads'?
2 | PEER port.yaml | port.yaml:2:24: address is 'tcp://127.0.0.1:99999'; it has to be
2 | PEER noport.yaml | noport.yaml:2:24: address is 'tcp://127.0.0.1'; it has to be
2 | PEER samename.yaml | samename.yaml:3:12: the name 'a' is used twice; each process needs its own
2 | PEER sameport.yaml | sameport.yaml:3:24: 'b' has the address of 'a', tcp://127.0.0.1:47001; give
2 | PEER far.yaml | far.yaml:2:24: address 'tcp://10.0.0.1:5555' of peer 'a' is not on the
2 | PEER beyond.yaml | beyond.yaml:2:57: peer 'a' lists block 9, but the bundle has blocks 0 to 3
2 | PEER backwards.yaml | backwards.yaml:2:57: blocks is '3-1'; list at least one number, each once,
2 | PEER huge.yaml | huge.yaml:2:80: threads is 2**70; it has to be a finite
2 | PEER nan.yaml | nan.yaml:1:27: slowest_mbit is '.nan'; it has to be a number
2 | PEER codec.yaml | codec.yaml:2:78: unknown codec 'gzip'; known here: raw
2 | status --check --peers codec.yaml | codec.yaml:2:78: unknown codec 'gzip'; known here: raw
2 | PEER engine.yaml | engine.yaml:2:79: engine is 'cuda'; it has to be one of auto, onnx, tensorrt
2 | PEER boolname.yaml | boolname.yaml:2:12: name is yes; it has to be 1 to 63 letters, digits, dots,
2 | PEER oddname.yaml | oddname.yaml:2:12: name is 'a b'; it has to be 1 to 63 letters, digits, dots,
2 | PEER badkey.yaml | badkey.yaml:2:83: public_key is
2 | PEER heartbeat.yaml | heartbeat.yaml:1:26: interval_ms is 1; it has to be a whole number from 5
2 | PEER python.yaml | python.yaml:1:8: the tag 'tag:yaml.org,2002:python/object/apply:os.system'
2 | PEER deep.yaml | deep.yaml: deeper than 20 levels or more than 100000 values
2 | PEER control.yaml | control.yaml:2:12: name is '\x1b[2Jx'; it has to be 1 to 63 letters,
2 | PEER latin1.yaml | latin1.yaml: not UTF-8 text (byte 8); save it as UTF-8
2 | PEER binary.yaml | binary.yaml: not UTF-8 text (byte 128); save it as UTF-8
2 | PEER /dev/zero | /dev/zero: cannot be read: larger than 4000000 bytes; check the path
2 | PEER good.yaml --threads 0 | '--threads': 0 is not in the range 1<=x<=1024
2 | PEER keyed.yaml | keyed.yaml has keys, so a needs its own: give --secret-key a.key_secret (made
2 | PEER keyed.yaml --secret-key nowhere | nowhere: no such secret key; make one with 'ls-edge keys new NAME', or check
2 | PEER keyed.yaml --secret-key /B}JG3dC0L?+vsqL52YT)d9cvMg7WSNJs&3HB}TU | --secret-key looks like a key and is no
2 | PEER keyed.yaml --secret-key 'secret-key = "/B}JG3dC0L?+vsqL52YT)d9cvMg7WSNJs&3HB}TU"' | --secret-key looks like a
2 | PEER keyed.yaml --secret-key a.key | a.key holds no CURVE secret key; it is a public key, give the .key_secret
2 | PEER keyed.yaml --secret-key public.key_secret | public.key_secret holds no CURVE secret key; it is a public key,
2 | PEER keyed.yaml --secret-key garbage.key_secret | garbage.key_secret holds no CURVE secret key; make one with
2 | PEER keyed.yaml --secret-key open.key_secret | open.key_secret can be read by others (mode 0644); run: chmod 600
1 | PEER keyed.yaml --secret-key k.key_secret | the secret key does not belong to 'a': its public key is not in the
2 | PEER keyed.yaml --secret-key empty | cannot read the secret key empty: Is a directory; check --secret-key
2 | PEER good.yaml --secret-key k.key_secret | good.yaml has no keys, so links would not be encrypted even with
2 | peer --name a --store st --peers good.yaml --secret-key k.key_secret | good.yaml has no keys, so links would not
2 | run | Missing option '--data'
2 | run --local 2 --data digits | --local starts peers with a bundle; give --bundle
2 | predict flat/a.png | give --bundle DIR to classify in this process, or --peers FILE
1 | run --peers good.yaml --bundle nowhere --data digits | nowhere is not a bundle: it has no manifest.json; write one
1 | run --peers good.yaml --bundle bundle --data others | others: the model has no class 'cat'; its classes are '0',
2 | RUN --policy best | '--policy': unknown policy 'best'; known here: nearest, sequential
2 | RUN --limit 0 | '--limit': 0 is not in the range 1<=x<=10000000
2 | RUN --concurrency 0 | '--concurrency': 0 is not in the range 1<=x<=1000000
2 | RUN --budget-ms nan | '--budget-ms': nan is not a finite number
2 | RUN --max-skips -1 | '--max-skips': -1 is not in the range 0<=x<=65536
2 | RUN --max-skips 99 | max_skips 99 is larger than the number of blocks; use 0 to 4
2 | RUN --audit 2 | '--audit': 2.0 is not in the range 0<=x<=1
2 | RUN --wait -1 | '--wait': -1.0 is not in the range 0<=x<=86400
2 | RUN --trace new --trace-events ./new | new is the file of two options; name another file for --trace
2 | RUN --report empty | cannot write empty: it is a folder; name a file
2 | RUN --secret-key k.key_secret | the secret key belongs to no source of good.yaml; add its public key under
2 | run --peers keyed.yaml --bundle bundle --data digits | keyed.yaml has keys, so this needs the key of a source: give
2 | run --peers beyond.yaml --bundle bundle --data digits | beyond.yaml:2:57: peer 'a' lists block 9, but the bundle
1 | run --peers good.yaml --bundle cut --data digits | cut/stem.onnx (stem) is not the file of this bundle: it has
2 | predict | Missing argument 'IMAGE...'
1 | predict --bundle bundle '' | the path is empty; name a file or folder
2 | publish bundle --to '' | '--to': the path is empty; name a file or folder
1 | predict --peers good.yaml --bundle bundle nowhere.png | nowhere.png: no such file or folder; check the path
1 | predict --peers good.yaml --bundle bundle empty | empty: the folder has no images; their names must end in .bmp,
2 | predict --peers good.yaml --bundle bundle flat/a.png --top 0 | '--top': 0 is not in the range 1<=x<=10000000
2 | demo --out file.txt | '--out': Directory 'file.txt' is a file
2 | demo --limit 1 | '--limit': 1 is not in the range 10<=x<=10000000
2 | peers new h1 --source ** | name '**': use 1 to 63 letters, digits, dots, hyphens or underscores
2 | serve --peers good.yaml --token-file SECRETTOKEN0123456 | --token-file, whose value may be a token itself, cannot
2 | serve --peers good.yaml --token-file eyJhb.eyJzd.SECRET | --token-file, whose value may be a token itself, cannot
2 | serve --peers good.yaml --token-file /SECRETTOKEN01234/abc | --token-file, whose value may be a token itself, cannot
2 | doctor --data digits | --data has the images of a report; give --report FILE too
2 | doctor rtsp://u:SECRET@cam/s | Got unexpected extra argument (rtsp://cam/s)
2 | doctor rtsp://cam/s?pwd=SECRET | Got unexpected extra argument (rtsp://cam/s?pwd=…)
2 | RUN --log-json --limit=rtmp://cam/app/SECRET | 'rtmp://cam/app/…' is not a valid integer
2 | peers new u:SECRET@h1 | '…@h1' is not a host; write
2 | serve --peers good.yaml --http u:SECRET@h:x | --http '…@h:x' is not HOST:PORT
2 | keys new a --out http://u:SECRET@h/x | cannot write http://h/x: a URL is not a folder; give another path
1 | verify http://cam/s?pwd=SECRET | http://cam/s?pwd=… is not a bundle
2 | http://u:SE/C@RET@cam/s | unknown command 'http://cam/s'; known here: demo,
2 | trian | unknown command 'trian'; did you mean 'train'? See
2 | version | unknown command 'version'; did you mean '--version'? See
2 | --jason | unknown option '--jason'; did you mean '--version'?
2 | train | Missing option '--out'
2 | train --out new | no data for new: give --data DATA, or name data.source in the --config file
2 | train --data digits | Missing option '--out'
1 | train --data nowhere --out new | nowhere: no such folder or tar; check the path, or write 'digits' for the
2 | train --data digits --out file.txt | '--out': Directory 'file.txt' is a file
2 | TRAIN --lr nan | '--lr': nan is not a finite number
2 | TRAIN --lr -1 | '--lr': -1.0 is not in the range 0<x<=
2 | TRAIN --epochs -1 | '--epochs': -1 is not in the range 0<=x<=1000000000
2 | TRAIN --depth 0 | '--depth': 0 is not in the range 1<=x<=10000
2 | TRAIN --method shufle | '--method': unknown method 'shufle'; did you mean 'shuffle'
2 | TRAIN --config nowhere.yaml | no such file and no recipe 'nowhere.yaml'; the recipes are deit_b_cifar100,
2 | TRAIN --config config.yaml | config.yaml:1:9: epochs is 'many'; it has to be a whole number
2 | TRAIN --config lr.yaml | lr.yaml:1:13: lr is '.nan'; it has to be a number
2 | TRAIN --config unknownkey.yaml | unknownkey.yaml:1:1: unknown key 'epoch'; did you mean 'epochs'?
2 | TRAIN --config list.yaml | list.yaml:1:1: the file is ['a', 'b']; it has to be a group of keys (data,
2 | TRAIN --config empty | empty: cannot be read: Is a directory; check the path
1 | TRAIN --init nowhere | nowhere is neither a run folder nor a file; check --init
1 | TRAIN --resume | new is not a run: it has no config.yaml; make one with 'ls-edge train --data DATA --out new'
2 | TRAIN --resume --overwrite | --resume and --overwrite exclude each other; leave one out
2 | export | Missing argument 'RUN'
1 | export nowhere --out new | nowhere is not a run: it has no config.yaml; make one with 'ls-edge train --data DATA --
1 | export bundle --out new | bundle is not a run: it has no config.yaml; make one with 'ls-edge train --data DATA --ou
2 | export run --out file.txt | cannot write file.txt: file.txt is not a folder; give another path
2 | export run --out new --precision int4 | '--precision': 'int4' is not one of 'fp16', 'fp32', 'int8'
2 | export run --out new --max-batch 0 | '--max-batch': 0 is not in the range 1<=x<=65536
"""
"""Exit code, command, and what is in its one line."""


def cases():
    found = []
    for line in CASES.strip().splitlines():
        code, words, what = (part.strip() for part in line.split(" | ", 2))
        first, _, rest = words.replace("2**70", str(2**70)).partition(" ")
        whole = f"{SHORT.get(first, first)} {rest}"
        found.append(pytest.param(int(code), whole, what.replace("2**70", str(2**70)), id=words))
    return found


@pytest.mark.parametrize(("code", "words", "what"), cases())
def test_a_mistake_is_one_line(command, zoo, monkeypatch, code, words, what):
    monkeypatch.chdir(zoo)
    before = sorted(os.listdir())
    found, out, err = command(*shlex.split(words))
    assert (found, err.count("\n")) == (code, 1), err
    if "--log-json" in words:
        err = f"ls-edge: {json.loads(err)['event']}"
    assert err.startswith("ls-edge: ")
    assert what in err
    assert "SECRET" not in err
    assert err.rstrip("\n").isprintable()
    assert "Traceback" not in out
    assert sorted(os.listdir()) == before, "left something behind"


@pytest.mark.parametrize("arguments", [("verify", "nowhere\udcff"), ("eval", "bundle", "--data", "\udce9")])
def test_names_that_are_not_text_are_printed(process, zoo, monkeypatch, arguments):
    monkeypatch.chdir(zoo)
    done = process(*arguments)
    assert done.returncode in (1, 2)
    assert done.stderr.count(b"\n") == 1
    assert rb"\x" in done.stderr


def test_names_that_are_not_text_are_escaped_in_json(process, zoo):
    shutil.copytree(zoo / "bundle", zoo / "odd\udcff\x1b[2J", dirs_exist_ok=True)
    done = process("verify", zoo / "odd\udcff\x1b[2J", "--json")
    assert json.loads(done.stdout)["bundle"].endswith(r"odd\xff\x1b[2J")
    done = process("eval", zoo / "odd\udcff\x1b[2J", "--data", "digits", "--limit", 4, "--orders", 2)
    assert done.returncode == 0
    assert b"\x1b" not in done.stdout
    assert rb"odd\xff\x1b[2J: tiny" in done.stdout


@pytest.mark.parametrize("device", ["/dev/full", "closed"])
def test_output_that_cannot_be_written_is_one_line(zoo, device):
    """A full disk below standard output, and a reader that has gone."""
    if device == "closed":
        read, write = os.pipe()
        os.close(read)
    else:
        write = os.open(device, os.O_WRONLY)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ls_edge", "verify", str(zoo / "bundle")], stdout=write, stderr=subprocess.PIPE,
            check=False, timeout=60,
        )  # fmt: skip
    finally:
        os.close(write)
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert done.stderr.count(b"\n") <= 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
@pytest.mark.parametrize("name", ["bundle/manifest.json", "good.yaml", "k.key_secret"])
def test_files_without_permission_are_one_line(zoo, name):
    path = zoo / name
    mode = path.stat().st_mode
    path.chmod(0)
    code = (
        "import os, sys; from ls_edge.cli.main import main\n"
        "import ls_edge.cli.commands.peer, ls_edge.runtime.peer.peer\n"
        "os.chdir(sys.argv.pop(1)); os.setuid(65534); main()"
    )
    for folder in (zoo, zoo.parent, zoo.parent.parent):
        folder.chmod(0o755)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, str(zoo), "peer", "--name", "a", "--bundle", "bundle", "--peers", "good.yaml",
             *(["--secret-key", name] if name.endswith("secret") else [])],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    finally:
        path.chmod(mode)
    assert done.returncode in (1, 2)
    assert done.stderr.count("\n") == 1, done.stderr
    assert name.split("/")[0] in done.stderr
    assert "not readable" in done.stderr or "Permission denied" in done.stderr
