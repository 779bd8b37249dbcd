//! The phase `job`.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::time::Instant;

use elasticdl_proto::{Cause, MembershipChange};
use elasticdl_tests::{Command, Running, counting_data, each_once, quantile, send};
use rustix::process::Signal;

use crate::kernels::completed;
use crate::processes::ONE_GPU;
use crate::{Drill, Fallible};

/// Shows that jobs on GPUs count every record exactly once over NCCL while their workers are
/// killed, on this machine's driver, and how long the others pause: one job with gradients of f32
/// on the wire, one with bf16. The gradient is summed in buckets while it is computed. After each
/// loss, the workers that are left begin on the host's ring and come back to NCCL. The model's
/// parameters count the records, so the model itself is the proof. A pause begins with the last
/// step that was committed before a worker was killed, and ends with the first one after; the
/// summary reports it.
pub(crate) fn job(drill: &mut Drill) -> Fallible<()> {
    if drill.devices < WORKERS {
        let text = "workers share a GPU here, and NCCL uses sockets: pauses and steps are longer \
                    than with a GPU for each worker";
        drill.note("job", text);
    }
    let errors: Vec<_> = ["f32", "bf16"]
        .into_iter()
        .filter_map(|wire| over_nccl(drill, wire).err().map(|error| format!("{wire}: {error}")))
        .collect();
    if errors.is_empty() { Ok(()) } else { Err(errors.join("; ").into()) }
}

/// A job with gradients of this data type on NCCL's wire.
fn over_nccl(drill: &mut Drill, wire: &str) -> Fallible<()> {
    drill.check_time()?;
    let folder = tempfile::tempdir()?;
    let (data, hurry) = (folder.path().join("data"), folder.path().join("hurry"));
    counting_data(&data, RECORDS, 3)?;
    let mut job = command(drill, &folder.path().join("job"), &hurry)?
        .option("training-data", &data)
        .option("num-epochs", EPOCHS.to_string())
        .option("num-workers", WORKERS.to_string())
        .option("global-batch-size", "144")
        .option("wire-dtype", wire)
        .start();
    job.wait_for_work_of(WORKERS);
    let mut transport = wait_for_nccl(&mut job)?;
    for kill in 0..KILLS {
        drill.check_time()?;
        // Another rank each time, the lowest one first.
        let (worker, pid) = job.members()[kill % WORKERS];
        let killed = Instant::now();
        send(pid, Signal::KILL);
        job.wait_for_members_without(WORKERS, &[worker]);
        // The new group has reported its own transport by then.
        job.wait_for_next_step();
        transport = wait_for_nccl(&mut job)?;
        job.wait_for_next_step();
        let what = format!("{wire}: from kill {} to {WORKERS} workers over NCCL", kill + 1);
        drill.add("job", what, killed.elapsed().as_secs_f64() * 1e3, "ms");
    }
    fs::write(&hurry, "")?;
    let ended = job.wait();
    drill.note("job", format!("{WORKERS} workers, {wire} gradients summed over {transport}"));
    let summary = completed(&ended)?;
    let records = summary.records;
    for (what, count) in [
        ("expected", records.expected),
        ("counted", records.counted),
        ("missing", records.missing),
        ("repeated", records.repeated),
    ] {
        drill.add("job", format!("{wire}: records {what}, {KILLS} kills"), count as f64, "");
    }
    let total = RECORDS * EPOCHS;
    let counts = format!("{EPOCHS} {EPOCHS} {total}");
    let found = summary.model_summary.as_deref().unwrap_or_default();
    if records != each_once(total) || found != counts {
        return Err(format!("not exactly once: the model counted {found}, not {counts}").into());
    }
    pauses(drill, &format!("{wire}: pause after a kill"), Cause::Lost, &summary.memberships);
    let what = format!("{wire}: pause for a joining worker");
    pauses(drill, &what, Cause::Join, &summary.memberships);
    Ok(())
}

/// The job, without its options. Workers that share a GPU are on different hosts for NCCL.
fn command(drill: &Drill, job_dir: &Path, hurry: &Path) -> Fallible<Command> {
    let mut words: Vec<OsString> = Vec::new();
    let mut variables = Vec::new();
    if drill.devices < WORKERS {
        let host_of_its_own = "export NCCL_HOSTID=drill-$ELASTICDL_LAUNCH; exec \"$0\" \"$@\"";
        words.extend(["/bin/sh", "-c", host_of_its_own].map(OsString::from));
        variables.extend(ONE_GPU);
        variables.push(("ELASTICDL_NCCL_SHARED", "1"));
    }
    let parameters = (drill.arguments.bytes_max / 4).clamp(RECORDS as usize, 1 << 18);
    let (bucket, parameters) = (parameters.div_ceil(4).to_string(), parameters.to_string());
    let records = RECORDS.to_string();
    words.push(env::current_exe()?.into());
    words.extend(["--gpu", "--hurry-when"].map(OsString::from));
    words.push(hurry.into());
    words.extend(["--records", &records, "--micros-per-record", "4000"].map(OsString::from));
    words.extend(["--parameters", &parameters, "--bucket", &bucket].map(OsString::from));
    drill.job_with(job_dir, &words, &variables)
}

/// Waits until the gradients are summed over NCCL, and returns its name. Fails once the group
/// reports that it goes on without.
fn wait_for_nccl(job: &mut Running) -> Fallible<String> {
    let is_settled = |what: &String| {
        what.starts_with("NCCL ") || (what.contains("NCCL") && !what.contains("is being built"))
    };
    let status =
        job.wait_for("NCCL", |status| status.allreduce_transport.as_ref().is_some_and(is_settled));
    let transport = status.allreduce_transport.unwrap_or_default();
    if transport.starts_with("NCCL ") {
        Ok(transport)
    } else {
        Err(format!("gradients are not summed over NCCL, but over {transport}").into())
    }
}

/// Adds the pauses at membership changes of one cause.
fn pauses(drill: &mut Drill, what: &str, cause: Cause, memberships: &[MembershipChange]) {
    let changes = memberships.iter().filter(|change| change.cause == cause);
    let mut gaps: Vec<(f64, &MembershipChange)> =
        changes.filter_map(|change| Some((change.gap_ms?, change))).collect();
    gaps.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let Some((longest, change)) = gaps.last() else { return };
    let mut all: Vec<f64> = gaps.iter().map(|(gap, _)| *gap).collect();
    let median = quantile(&mut all, 0.5);
    drill.add("job", format!("{what}, median of {}", all.len()), median, "ms");
    drill.add("job", format!("{what}, the longest"), *longest, "ms");
    for (part, took) in change.phases() {
        drill.add("job", format!("{what}, of which {part}"), took.unwrap_or(0.0), "ms");
    }
}

const WORKERS: usize = 3;
const KILLS: usize = 2;
/// Enough that the job outlasts the kills; after them, it takes no more time than its steps do.
const RECORDS: u64 = 20_000;
const EPOCHS: u64 = 2;
