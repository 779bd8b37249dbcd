"""Tests of the chart in this folder, by the engine of Helm, which ``.ci/python`` installs.

With a cluster that has the image of ``.ci/test-image``, in KUBECONFIG, a release is installed
there, too: ``python -m unittest test_chart.Cluster``.
"""

import json
import os
import pathlib
import subprocess
import tempfile
import time
import tomllib
import unittest

try:
    import helm_python as helm
    import yaml
except ImportError as error:
    raise unittest.SkipTest(f"{error}: pip install helm-python-sdk pyyaml")

HERE = pathlib.Path(__file__).parent
OPTIONS = "elasticdl/options"
IMAGE = os.environ.get("ELASTICDL_TEST_IMAGE", "localhost/elasticdl-tests:dev")


def objects(text):
    """The objects of a document, by kind, namespace and name."""
    loaded = [each for each in yaml.safe_load_all(text) if each]
    key = lambda each: (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"])
    found = {key(each): each for each in loaded}
    assert len(found) == len(loaded), "an object is there twice"
    return found


def files(*names, namespace="elasticdl"):
    """The objects of files of this folder, as README.md says for another namespace."""
    read = [(HERE / name).read_text() for name in names]
    own = "namespace: elasticdl"
    return objects("\n---\n".join(read).replace(own, f"namespace: {namespace}"))


def rendered(values=None, namespace="elasticdl"):
    """The objects of a release with these values."""
    with helm.Chart.load(HERE) as chart:
        parts = chart.render(values, name="release", namespace=namespace)
    return objects("\n---\n".join(parts.values()))


def example():
    return yaml.safe_load((HERE / "example/values.yaml").read_text())


class Chart(unittest.TestCase):
    maxDiff = None

    def test_the_chart_has_no_errors_and_no_warnings(self):
        report = helm.lint(HERE)
        self.assertEqual(report["errors"], [])
        messages = [each["error"] for each in report["messages"]]
        self.assertEqual(messages, ["icon is recommended"])

    def test_by_default_the_chart_is_what_kustomize_applies_but_for_the_namespace(self):
        base = yaml.safe_load((HERE / "kustomization.yaml").read_text())["resources"]
        everything = files(*base)
        self.assertEqual(rendered({"namespace": {"create": True}}), everything)
        del everything["Namespace", None, "elasticdl"]
        self.assertEqual(rendered(), everything)

    def test_all_objects_of_a_release_are_in_its_namespace(self):
        switches = ("kubeflow", "monitoring", "namespace", "topology")
        values = {**example(), "schedulers": ["native", "volcano"]}
        values.update((key, {"create": True}) for key in switches)
        found = rendered(values, namespace="team")
        self.assertIn(("Namespace", None, "team"), found)
        self.assertEqual({namespace for _, namespace, _ in found}, {None, "team"})
        bindings = [each for each in found.values() if each["kind"].endswith("Binding")]
        self.assertEqual(len(bindings), 7)
        for binding in bindings:
            self.assertEqual(binding["subjects"][0]["namespace"], "team")

    def test_what_is_optional_is_as_in_its_files(self):
        plain = rendered()
        cases = (
            ({"topology": {"create": True}}, ["topology/nodes.yaml"]),
            ({"kubeflow": {"create": True}}, ["kubeflow/rbac.yaml", "kubeflow/runtime.yaml"]),
            ({"schedulers": ["volcano"]}, ["schedulers/volcano.yaml"]),
            (
                {"schedulers": ["native", "volcano"]},
                ["schedulers/native.yaml", "schedulers/volcano.yaml"],
            ),
        )
        for values, names in cases:
            self.assertEqual(rendered(values), {**plain, **files(*names)})
        chosen = rendered({"kubeflow": {"create": True, "image": "team/elasticdl:2"}})
        self.assertIn("image': 'team/elasticdl:2'", str(chosen))
        self.assertNotIn("elasticdl:0.1.0", str(chosen))
        without = rendered({"priorityClasses": {"create": False}})
        self.assertEqual({**without, **files("priorityclasses.yaml")}, plain)
        self.assertFalse([key for key in without if key[0] == "PriorityClass"])

    def test_monitoring_is_what_kustomize_applies(self):
        base = yaml.safe_load((HERE / "monitoring/kustomization.yaml").read_text())
        expected = files(*(f"monitoring/{name}" for name in base["resources"]))
        [generated] = base["configMapGenerator"]
        made = rendered({"monitoring": {"create": True}})
        dashboard = made.pop(("ConfigMap", "elasticdl", generated["name"]))
        self.assertEqual(made, {**rendered(), **expected})
        self.assertEqual(dashboard["metadata"]["labels"], generated["options"]["labels"])
        [name] = generated["files"]
        self.assertEqual(list(dashboard["data"]), [name])
        shipped = json.loads((HERE / "monitoring" / name).read_text())
        self.assertEqual(json.loads(dashboard["data"][name]), shipped)

    def test_the_job_of_the_example_is_the_declared_job(self):
        key = ("Job", "elasticdl", "mnist")
        made, declared = rendered(example())[key], files("example/declared.yaml")[key]
        options = [each["metadata"]["annotations"].pop(OPTIONS) for each in (made, declared)]
        self.assertEqual(*map(tomllib.loads, options))
        self.assertEqual(made, declared)

    def test_each_type_of_option_and_all_that_a_job_can_have_is_passed_on(self):
        options = {
            "num-workers": 4,
            "validation-split": 0.25,
            "autoscale": True,
            "suspend": False,
            "max-steps": 100_000_000,
            "volume": ["claim_name=a,mount_path=/a", "claim_name=b,mount_path=/b"],
            "job-name": "\"quoted\" <&> \\ ä\nline",
            "program": ["python", "train.py"],
        }
        mounted = {
            "imagePullSecrets": [{"name": "registry"}],
            "volumes": [{"name": "templates", "configMap": {"name": "templates"}}],
        }
        mounts = [{"name": "templates", "mountPath": "/templates"}]
        job = {"image": "i:1", "options": options, "volumeMounts": mounts, **mounted}
        job["ttlSecondsAfterFinished"] = 0
        spec = rendered({"jobs": {"a-1": job}})["Job", "elasticdl", "a-1"]
        self.assertEqual(tomllib.loads(spec["metadata"]["annotations"][OPTIONS]), options)
        self.assertEqual(spec["spec"]["ttlSecondsAfterFinished"], 0)
        pod = spec["spec"]["template"]["spec"]
        self.assertEqual({name: pod[name] for name in mounted}, mounted)
        self.assertEqual(pod["containers"][0]["volumeMounts"], mounts)

    @unittest.skipUnless("ELASTICDL" in os.environ, "set ELASTICDL, as .ci/python does")
    def test_the_command_accepts_the_options_of_the_example(self):
        job = rendered(example())["Job", "elasticdl", "mnist"]
        image = job["spec"]["template"]["spec"]["containers"][0]["image"]
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(job["metadata"]["annotations"][OPTIONS])
            file.flush()
            train = [os.environ["ELASTICDL"], "train", "--dry-run", "--image", image]
            train += ["--job-name", "mnist", "--config", file.name]
            done = subprocess.run(train, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_values_that_the_chart_does_not_have_are_refused(self):
        job = {"image": "i:1", "options": {"program": ["p"]}}
        rendered({"jobs": {"a": job}})
        for values, named in (
            ({"monitorin": {"create": True}}, "monitorin"),
            ({"schedulers": ["kueue"]}, "/schedulers/0"),
            ({"jobs": {"Upper": job}}, "Upper"),
            ({"jobs": {"a": {**job, "imag": "j"}}}, "imag"),
            ({"jobs": {"a": {"image": "i:1", "options": {}}}}, "program"),
            ({"jobs": {"a": {"image": "i:1", "options": {**job["options"], "env": {}}}}}, "env"),
            ({"jobs": {"a": {"options": job["options"]}}}, "image"),
        ):
            with self.assertRaisesRegex(helm.HelmValuesError, named):
                rendered(values)


@unittest.skipUnless("KUBECONFIG" in os.environ, "set KUBECONFIG to a cluster for tests")
class Cluster(unittest.TestCase):
    namespace = "elasticdl-chart"

    def kubectl(self, *words):
        command = ["kubectl", "--namespace", self.namespace, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def pods(self, role):
        """The uids of the running pods of a role."""
        listed = self.kubectl("get", "pods", "-l", f"elasticdl/role={role}", "-o", "json")
        running = [p for p in json.loads(listed)["items"] if p["status"]["phase"] == "Running"]
        return {pod["metadata"]["uid"] for pod in running}

    def wait_for(self, what, is_so):
        until = time.monotonic() + 120
        while not is_so():
            if time.monotonic() > until:
                self.fail(f"{what}\n" + self.kubectl("get", "pods,jobs,events"))
            time.sleep(0.5)

    def test_a_release_trains_is_scaled_by_an_upgrade_and_leaves_nothing(self):
        def values(num_workers):
            resources = "cpu=10m,memory=64Mi"
            program = "counting --records 6000 --micros-per-record 3000".split()
            sizes = {"num-workers": num_workers, "num-epochs": 50}
            options = {"training-data": "/data", **sizes, "program": program}
            options.update({f"{role}-resources": resources for role in ("master", "worker")})
            return {"jobs": {"count": {"image": IMAGE, "options": options}}}

        with helm.Config(namespace=self.namespace) as config:
            self.addCleanup(self.kubectl, "delete", "namespace", self.namespace)
            config.install(HERE, "release", values(2), create_namespace=True)
            self.wait_for("two workers", lambda: len(self.pods("worker")) == 2)
            before = self.pods("master") | self.pods("worker")
            config.upgrade(HERE, "release", values(2))
            config.upgrade(HERE, "release", values(3))
            self.wait_for("three workers", lambda: len(self.pods("worker")) == 3)
            self.assertLess(before, self.pods("master") | self.pods("worker"))
            config.uninstall("release")
            kinds = "pods,jobs,services,configmaps,secrets"
            left = lambda: self.kubectl("get", kinds, "-o", "name").split()
            ours = lambda: [name for name in left() if "count" in name or "release" in name]
            self.wait_for("the release is gone", lambda: not ours())


if __name__ == "__main__":
    unittest.main()
