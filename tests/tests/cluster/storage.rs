//! Workers that are all lost start from a checkpoint in a shared volume, another job resumes from
//! it, and an exported model is evaluated and predicts while pods are killed.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use elasticdl::Reader as _;
use elasticdl::readers::ParquetRows;
use elasticdl_proto::Summary;
use elasticdl_tests::cluster::{Job, Namespace, RECORDS, name, text};
use elasticdl_tests::{ChildOutput, each_once, send};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::{cluster_tests, namespace};

/// A namespace, and a folder of this machine, which is the node, that pods mount as `/kept`.
struct VolumeFixture {
    namespace: Namespace,
    folder: TempDir,
    volume: String,
}

impl VolumeFixture {
    fn new(test: &str) -> Self {
        let namespace = namespace(test);
        let folder = tempfile::tempdir().unwrap();
        // Pods run as an unprivileged user.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let volume = format!("host_path={},mount_path=/kept", folder.path().display());
        Self { namespace, folder, volume }
    }

    fn options<'a>(&'a self, options: &[&'a str]) -> Vec<&'a str> {
        [&["--volume", &self.volume], options].concat()
    }

    /// Runs `evaluate` or `predict` with the model that the job before has exported, while pods are
    /// deleted and killed, and returns its summary.
    fn inference(&self, command: &str, options: &[&str]) -> Summary {
        let model = [
            "--model",
            "/kept/model.safetensors",
            "--num-workers",
            "3",
            "--records-per-shard",
            "100",
        ];
        let options = self.options(&[&model, options].concat());
        let program = ["--records", &RECORDS.to_string(), "--inference-micros", "20000"];
        let job = command;
        let child = ChildOutput::start(self.namespace.inference(command, job, &options, &program));
        for done in [1, 10] {
            let pods = self.namespace.wait_for(job, "some shards are done", || {
                let shards = self.namespace.status(job)?.shards?;
                let pods = self.namespace.running_workers(job);
                (shards.done >= done && pods.len() == 3).then_some(pods)
            });
            self.namespace
                .delete_pod(name(&pods[0]), &["--grace-period=0", "--force", "--wait=false"]);
            self.namespace.kill_inside(&pods[1]);
        }
        self.namespace.hurry(job);
        let (code, output) = child.wait();
        assert_eq!(code, Some(0), "{output}\n{}", self.namespace.master_log(job));
        let summary = self.namespace.summary(job).unwrap();
        assert_eq!((&*summary.state, summary.records), ("completed", each_once(RECORDS)));
        summary
    }
}

fn workers_that_are_all_lost_begin_from_a_checkpoint_and_so_does_another_job() {
    let fixture = VolumeFixture::new("kept");
    let namespace = &fixture.namespace;
    let checkpoints = ["--checkpoint-dir", "/kept/checkpoints", "--num-epochs", "25"];
    // No checkpoint is due during the test.
    let options = fixture
        .options(&[&checkpoints[..], &["--num-workers", "3", "--checkpoint-every", "1h"]].concat());
    let mut job = Job::start(namespace, "count", &options, 4000);
    let _ = job.wait_for_group(3);
    let said = namespace.elasticdl("checkpoint", ["count"]).output().unwrap();
    assert!(said.status.success(), "{}", text(&said));
    let pods = job.wait_for_group(3);
    // All at once: a single one that is left would have the state.
    let inside = |pod| Namespace::process_inside(pod, "counting").unwrap();
    pods.iter().map(inside).collect::<Vec<_>>().into_iter().for_each(|pid| send(pid, Signal::KILL));
    let _ = job.wait_for_others(3, &pods);
    job.wait_for_event(&["the group begins at step", "from checkpoint"]);
    let stopped = namespace.elasticdl("stop", ["count"]).output().unwrap();
    assert!(stopped.status.success(), "{}", text(&stopped));
    let (_, output) = job.wait();
    let summary = namespace.summary("count").unwrap();
    assert_eq!(summary.state, "stopped", "{output}");
    let newest = summary.checkpoints.unwrap().newest.unwrap();
    assert_eq!(newest.step, summary.steps, "the final state is kept");
    job.assert_deletes();

    // Another job, of one worker, resumes where the first was stopped; the model counts the records
    // of both jobs.
    let options = fixture.options(&["--resume-from", "/kept/checkpoints", "--num-epochs", "25"]);
    let job = Job::start(namespace, "on", &options, 4000);
    let output = job.assert_completes(25);
    let first = summary.steps;
    assert!(
        first > 0 && output.contains(&format!("resumed from step {first} (0 steps lost)")),
        "{first}: {output}"
    );
}

fn pods_evaluate_and_predict_each_record_once() {
    let fixture = VolumeFixture::new("inference");
    let namespace = &fixture.namespace;
    let options =
        ["--num-workers", "2", "--num-epochs", "2", "--export", "/kept/model.safetensors"];
    Job::start(namespace, "learned", &fixture.options(&options), 0).assert_completes(2);

    let summary = fixture.inference("evaluate", &[]);
    // The counting model's loss is 1 for every record.
    assert_eq!(summary.metrics.unwrap()["loss"], Some(1.0));

    let summary = fixture.inference("predict", &["--predictions", "/kept/out"]);
    assert_eq!(summary.output.as_deref(), Some("/kept/out"));
    let mut files: Vec<PathBuf> = fs::read_dir(fixture.folder.path().join("out"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    let mut next = 0;
    for path in files {
        let mut reader = ParquetRows::new().i64("record").f32("value");
        for file in reader.describe(path.to_str().unwrap()).unwrap().files {
            for row in reader.read(&file, 0..file.records).unwrap() {
                // Each record was counted in both epochs.
                assert_eq!((row.i64(0), row.f32(1)), (next, 2.0), "{}", path.display());
                next += 1;
            }
        }
    }
    assert_eq!(next, RECORDS as i64);
}

cluster_tests![
    workers_that_are_all_lost_begin_from_a_checkpoint_and_so_does_another_job,
    pods_evaluate_and_predict_each_record_once,
];
