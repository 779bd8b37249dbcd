//! A full or read-only disk, a closed standard error and doubled signals end no job and lose no
//! model.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use elasticdl_tests::{JobFixture, exported_counts, send};
use rustix::process::Signal;

use crate::PROGRAMS;

/// A small file system that can be filled up. Unmounted when it is dropped.
struct SmallDisk {
    folder: PathBuf,
}

impl SmallDisk {
    fn mount(folder: PathBuf, size: &str) -> Self {
        fs::create_dir(&folder).unwrap();
        let options = format!("size={size}");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "none"])
            .arg(&folder)
            .status();
        assert!(mounted.is_ok_and(|status| status.success()), "root mounts a tmpfs");
        Self { folder }
    }

    fn filler(&self) -> PathBuf {
        self.folder.join("filler")
    }

    /// Leaves not a byte.
    fn fill(&self) {
        let mut file = fs::File::create(self.filler()).unwrap();
        while file.write_all(&[b'x'; 4096]).is_ok() {}
    }

    fn clear(&self) {
        fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        drop(Command::new("umount").arg("-l").arg(&self.folder).status());
    }
}

/// `sh -c` that runs its arguments with a full disk as standard error.
const FULL_STDERR: &str = "exec \"$@\" 2> /dev/full";

/// The disk is smaller than the program's file, of which no part stays.
#[test]
#[ignore = "needs root, to mount a small disk"]
fn a_job_on_a_full_disk_trains_and_its_master_is_replaced() {
    let fixture = JobFixture {
        // A minute, unless it is hurried.
        micros_per_record: 8000,
        restart_without_checkpoint: false,
        ..JobFixture::new(PROGRAMS, 2)
    };
    let disk = SmallDisk::mount(fixture.path("job"), "2m");
    let command = fixture.command(1).option("checkpoint-dir", "none");
    let mut job = command.started_by(["/bin/sh", "-c", FULL_STDERR, "sh"]).start();
    job.wait_for_work_of(2);
    assert!(!disk.folder.join("program").exists());
    disk.fill();
    for _ in 0..2 {
        let (lost, pid) = job.members()[1];
        send(pid, Signal::KILL);
        job.wait_for_members_without(2, &[lost]);
        job.wait_for_next_step();
    }
    job.kill_master();
    disk.clear();
    job.resume();
    job.wait_for_return_of(2);
    fs::write(fixture.path("hurry"), "").unwrap();
    job.wait().assert_exact("a full disk");
}

#[test]
fn a_worker_whose_standard_error_is_a_full_disk_trains() {
    let fixture = JobFixture {
        script: Some(FULL_STDERR.into()),
        micros_per_record: 0,
        ..JobFixture::new(PROGRAMS, 2)
    };
    let ended = fixture.command(1).run();
    ended.assert_exact("a full standard error");
    assert_eq!(ended.memberships().len(), 1, "{}", ended.output);
}

#[test]
fn a_best_model_that_cannot_be_written_is_written_later_and_training_goes_on() {
    let fixture = JobFixture::new(PROGRAMS, 2);
    let (out, hurry) = (fixture.path("out"), fixture.path("hurry"));
    let best = out.join("best.safetensors");
    let mut job = fixture
        .command(1)
        .option("validation-data", fixture.data())
        .option("evaluate-every", "10")
        .option("best-metric", "seen:max")
        .option("export-best", &best)
        .start();
    job.wait_for_first_steps();
    // A file is where the folder was.
    fs::remove_dir_all(&out).unwrap();
    fs::write(&out, "").unwrap();
    let says = |what: &'static str| {
        move |status: &elasticdl_proto::Status| {
            status.events.iter().any(|event| event.contains(what))
        }
    };
    job.wait_for("an export that fails", says("is not exported: "));
    job.wait_for_next_step();
    fs::remove_file(&out).unwrap();
    job.wait_for("an export", says("is exported"));
    fs::write(hurry, "").unwrap();
    let ended = job.wait();
    ended.assert_exact("a best model that was not written");
    assert!(best.is_file());
    let known = ended.summary().evaluations.as_ref().unwrap();
    assert_eq!(known.best.as_ref().unwrap().export.as_deref(), best.to_str());
}

#[test]
fn a_failed_job_leaves_the_model_of_a_good_one() {
    const RECORDS: u64 = 600;
    let good = JobFixture {
        records: RECORDS,
        epochs: 1,
        micros_per_record: 0,
        global_batch_size: 30,
        ..JobFixture::new(PROGRAMS, 2)
    };
    let (model, beside) = (good.path("m.safetensors"), good.path("m.safetensors.failed"));
    let train = |fixture: &JobFixture| {
        fixture.command(0).option("export", &model).option("shuffle", "none").run()
    };
    assert_eq!(train(&good).code, Some(0));
    let fail = |fixture: &JobFixture, beside: Option<&Path>| {
        let ended = train(fixture);
        ended.assert_outcome(1, "failed");
        assert_eq!(ended.summary().export.as_deref(), beside.and_then(Path::to_str));
        assert_eq!(exported_counts(&model), [1.0; RECORDS as usize]);
    };
    let at_start = JobFixture { program_options: &["--nan-at", "0"], ..good };
    fail(&at_start, None);
    assert!(!beside.exists(), "it has made no step");
    let later = JobFixture { program_options: &["--nan-at", "599"], ..at_start };
    fail(&later, Some(&beside));
    assert!(exported_counts(&beside).iter().sum::<f32>() < RECORDS as f32);
}

#[test]
fn two_signals_of_one_request_and_a_closed_terminal_leave_a_checkpoint() {
    for (signals, code) in [(&[Signal::TERM; 2][..], 143), (&[Signal::HUP], 129)] {
        // It lasts until it is stopped, also on a busy machine.
        let fixture = JobFixture { epochs: 100, ..JobFixture::new(PROGRAMS, 2) };
        let mut job = fixture.command(0).start();
        job.wait_for_first_steps();
        for signal in signals {
            job.signal(*signal);
            std::thread::sleep(Duration::from_millis(20));
        }
        let ended = job.wait();
        ended.assert_outcome(code, "stopped");
        let saved = ended.summary().checkpoints.as_ref().map(|known| known.saved);
        assert_eq!(saved, Some(1), "{signals:?}: {}", ended.output);
    }
}
