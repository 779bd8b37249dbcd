"""Tests of the runtime in kubeflow/ and of its example, by the models of Kubeflow Trainer's API,
which ``.ci/python`` installs."""

import pathlib
import unittest

try:
    import yaml
    from kubeflow_trainer_api import models
except ImportError as error:
    raise unittest.SkipTest(f"{error}: pip install kubeflow-trainer-api pyyaml")

HERE = pathlib.Path(__file__).parent
STEP = "trainer.kubeflow.org/trainjob-ancestor-step"


def read(name):
    """The objects of a file of this folder, by kind and name."""
    loaded = yaml.safe_load_all((HERE / name).read_text())
    return {(each["kind"], each["metadata"]["name"]): each for each in loaded}


def runtime():
    return read("kubeflow/runtime.yaml")["TrainingRuntime", "elasticdl"]


def train_job():
    return read("example/trainjob.yaml")["TrainJob", "mnist"]


class Kubeflow(unittest.TestCase):
    maxDiff = None

    def test_the_api_has_all_fields_of_the_runtime_and_of_the_example(self):
        for model, made in (
            (models.TrainerV1alpha1TrainingRuntime, runtime()),
            (models.TrainerV1alpha1TrainJob, train_job()),
        ):
            self.assertEqual(model.from_dict(made).to_dict(), made)
            made["spec"]["unknown"] = 1
            self.assertNotEqual(model.from_dict(made).to_dict(), made)

    def test_the_example_names_the_runtime(self):
        reference = train_job()["spec"]["runtimeRef"]
        made = runtime()
        self.assertEqual(reference, {"kind": made["kind"], "name": made["metadata"]["name"]})
        spaces = {each["metadata"]["namespace"] for each in (made, train_job())}
        self.assertEqual(spaces, {"elasticdl"})

    def test_the_declaring_pod_is_one_and_no_field_of_a_train_job_changes_it(self):
        [job] = runtime()["spec"]["template"]["spec"]["replicatedJobs"]
        self.assertEqual((job["name"], job["replicas"]), ("node", 1))
        spec = job["template"]["spec"]
        self.assertFalse({"parallelism", "completions"} & set(spec))
        # The controller changes jobs of these steps only.
        label = job["template"]["metadata"]["labels"][STEP]
        self.assertNotIn(label, ("trainer", "dataset-initializer", "model-initializer"))
        [container] = spec["template"]["spec"]["containers"]
        self.assertEqual(container["command"][:2], ["elasticdl", "declare"])

    def test_the_clients_of_kubeflow_can_list_the_runtime(self):
        made = runtime()
        self.assertIn("trainer.kubeflow.org/framework", made["metadata"]["labels"])
        self.assertIn("numNodes", made["spec"]["mlPolicy"])
        [job] = made["spec"]["template"]["spec"]["replicatedJobs"]
        self.assertIn(STEP, job["template"]["metadata"]["labels"])
        # They find a pod by the index that the default completionMode gives it.
        self.assertNotIn("completionMode", job["template"]["spec"])
        [container] = job["template"]["spec"]["template"]["spec"]["containers"]
        self.assertEqual((container["name"], bool(container["image"])), ("node", True))

    def test_the_pod_has_the_rights_of_declared_jobs_and_may_write_the_status_alone(self):
        rights = read("kubeflow/rbac.yaml")
        [job] = runtime()["spec"]["template"]["spec"]["replicatedJobs"]
        account = job["template"]["spec"]["template"]["spec"]["serviceAccountName"]
        self.assertIn(("ServiceAccount", account), rights)
        bindings = [each for each in rights.values() if each["kind"] == "RoleBinding"]
        subject = {"kind": "ServiceAccount", "name": account, "namespace": "elasticdl"}
        self.assertEqual([each["subjects"] for each in bindings], [[subject], [subject]])
        declared = read("rbac-declared.yaml")
        for binding in bindings:
            role = ("Role", binding["roleRef"]["name"])
            self.assertTrue(role in rights or role in declared, role)
        rules = rights["Role", "elasticdl-train-job"]["rules"]
        verbs = {rule["resources"][0]: rule["verbs"] for rule in rules}
        self.assertEqual(
            verbs, {"trainjobs": ["get", "list", "watch"], "trainjobs/status": ["patch"]}
        )


if __name__ == "__main__":
    unittest.main()
