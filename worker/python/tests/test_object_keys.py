"""Keys of objects, in and out, against an S3 server and a client that are not ours.

The server is moto's, the client boto3. Without them the tests are skipped.
"""

import logging
import os
import pathlib
import subprocess
import tempfile
import unittest

import jobs

try:
    import boto3
    from moto.server import ThreadedMotoServer
except ImportError:
    boto3 = None

BUCKET = "bucket"
# What a URL, a shell, XML or a client may take for something else.
NAMES = [
    "plain", "a b", " a", "a ", "a#b", "a#1", "a?b", "a%20b", "100%", "a+b", "ü", "e\u0301", "😀",
    '"q"', "it's", "[1]", "{x}", "a\\b", "^`", "~a", "*", "a&b=c;d", "<t>", "a|b", "..a", "a..",
    "x" * 255, "a,b", "a:b@c", "$HOME",
]  # fmt: skip
# Keys that no path can name: left out, and said.
ODD = ["in/a//b.txt", "in/./x.txt", "in/a/../b.txt"]
RECORDS = 4
CONTEXT = 16


@jobs.needs_elasticdl
@unittest.skipUnless(boto3, "needs moto[server] and boto3")
class ObjectKeys(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        cls.server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        cls.server.start()
        cls.addClassCleanup(cls.server.stop)
        endpoint = "http://{}:{}".format(*cls.server.get_host_and_port())
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        cls.variables = {**keys, "AWS_REGION": "us-east-1", "AWS_ENDPOINT": endpoint}
        cls.client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        cls.client.create_bucket(Bucket=BUCKET)
        for name in NAMES:
            body = bytes(range(97, 97 + 26)) * 3
            cls.put(f"in/{name}/{name[:200]}.txt", body[: RECORDS * CONTEXT + 1])
        for key in ODD:
            cls.put(key, b"x" * 100)
        # A folder, as S3's console makes it.
        cls.put("in/", b"")

    @classmethod
    def put(cls, key, body):
        cls.client.put_object(Bucket=BUCKET, Key=key, Body=body)

    def keys(self, prefix):
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [found["Key"] for page in pages for found in page.get("Contents", [])]

    def train(self, data, *options):
        """Runs a job, and returns its exit code and what it printed."""
        program = pathlib.Path(jobs.ELASTICDL).parent / "bytelm"
        with tempfile.TemporaryDirectory() as folder:
            command = [
                *(jobs.ELASTICDL, "train", "--local", "--job-dir", f"{folder}/job"),
                *("--num-workers", "1", "--global-batch-size", "4", "--dashboard-port", "none"),
                *(word for source in data for word in ("--training-data", source)),
                *options,
                *("--", str(program), "--width", "8", "--context", str(CONTEXT)),
            ]
            environment = {**os.environ, **self.variables}
            ended = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=60, check=False
            )
        return ended.returncode, ended.stdout + ended.stderr

    def test_objects_of_all_names_are_read_from_a_folder(self):
        code, output = self.train([f"s3://{BUCKET}/in"])
        self.assertEqual(code, 0, output)
        # Names that begin with a dot are hidden.
        records = RECORDS * sum(not name.startswith(".") for name in NAMES)
        self.assertIn(f"{records} expected, {records} counted, 0 missing", output)
        self.assertIn(f"skipped {len(ODD)} files in the folder of the data", output)

    def test_objects_of_all_names_are_read_by_their_names(self):
        sources = [f"s3://{BUCKET}/in/{name}/{name[:200]}.txt" for name in NAMES]
        code, output = self.train(sources)
        self.assertEqual(code, 0, output)
        records = RECORDS * len(NAMES)
        self.assertIn(f"{records} expected, {records} counted, 0 missing", output)

    def test_checkpoints_and_exports_are_written_and_found_where_they_are_named(self):
        for name in ["runs #1", "größe %41?x", "😀 [a]"]:
            folder, export = f"out/{name}/ck", f"out/{name}/m#1.safetensors"
            code, output = self.train(
                [f"s3://{BUCKET}/in/plain"],
                *("--checkpoint-dir", f"s3://{BUCKET}/{folder}"),
                *("--export", f"s3://{BUCKET}/{export}"),
            )
            self.assertEqual(code, 0, output)
            found = self.keys(f"out/{name}/")
            self.assertIn(export, found)
            manifests = [key for key in found if key.endswith("/manifest.json")]
            self.assertTrue(manifests and all(key.startswith(folder) for key in manifests), found)
            code, output = self.train(
                [f"s3://{BUCKET}/in/plain"],
                *("--resume-from", f"s3://{BUCKET}/{folder}", "--num-epochs", "2"),
            )
            self.assertEqual(code, 0, output)

    def test_a_bucket_that_does_not_exist_is_one_sentence(self):
        for options in (["--export", "s3://nobk/x"], ["--checkpoint-dir", "s3://nobk/x"]):
            code, output = self.train([f"s3://{BUCKET}/in/plain"], *options)
            self.assertEqual(code, 2, output)
            self.assertIn("s3://nobk/x", output)
            self.assertIn("the bucket does not exist", output)
            self.assertNotIn("probe", output)
            self.assertNotIn("<", output)
        code, output = self.train(["s3://nobk/data"])
        self.assertEqual(code, 2, output)
        self.assertIn("s3://nobk/data: the bucket does not exist", output)


if __name__ == "__main__":
    unittest.main()
