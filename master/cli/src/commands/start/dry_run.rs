//! `elasticdl train --local --dry-run`: prints the job that would be started.

use elasticdl_master::job::{Batch, CheckpointEvery, JobSpec, Work};
use elasticdl_master::jobdir::{JobDir, quoted};
use elasticdl_master::local::hosts::Hosts;
use elasticdl_proto::shown_sources;

use super::local_job::LocalJob;
use super::request::StartRequest;
use crate::process::{Failure, print};

/// Checks a request and prints the resulting job, without starting it or writing anything.
/// Returns the exit code.
pub(super) fn show(request: StartRequest) -> Result<u8, Failure> {
    let mut job = LocalJob::new(request)?;
    let job_dir = job.job_dir.clone();
    JobDir::check(&job_dir).map_err(|e| Failure::usage(e.to_string()))?;
    job.keep_checkpoints_in(&job_dir);
    print(&describe(&job))
}

fn describe(job: &LocalJob) -> String {
    let spec = &job.spec;
    let words = job.args.iter().map(|word| quoted(word.as_ref()));
    let program = std::iter::once(quoted(&job.program)).chain(words).collect::<Vec<_>>().join(" ");
    let mut rows = vec![("program", program), ("data", shown_sources(&spec.options.training_data))];
    let who = if spec.autoscale { "--autoscale takes" } else { "`elasticdl scale` accepts" };
    let workers =
        format!("{} ({who} {} to {})", spec.num_workers, spec.min_workers, spec.max_workers);
    rows.push(("workers", workers));
    rows.extend((spec.spares > 0).then(|| ("spares", spec.spares.to_string())));
    rows.extend(describe_work(spec));
    rows.push(("directory", job.job_dir.display().to_string()));
    let path = |path: &std::path::PathBuf| path.display().to_string();
    rows.extend(job.summary.as_ref().map(|file| ("summary", path(file))));
    rows.extend(job.metrics.map(|address| ("metrics", format!("http://{address}/metrics"))));
    rows.extend(job.tensorboard_dir.as_ref().map(|folder| ("tensorboard", path(folder))));
    if let Some(Hosts { hosts, command, .. }) = &job.hosts {
        let names: Vec<String> =
            hosts.iter().map(|host| format!("{} ({})", host.name, host.slots)).collect();
        rows.push(("hosts", format!("{}, by `{}`", names.join(", "), command.join(" "))));
    }
    let mut text = format!("job {} would be started on this machine (dry run)\n", spec.name);
    for (name, value) in rows {
        text.push_str(&format!("  {name:<13} {value}\n"));
    }
    text
}

fn describe_work(spec: &JobSpec) -> Vec<(&'static str, String)> {
    let mut rows = Vec::new();
    match &spec.options.work {
        Work::Evaluate { model } => rows.push(("model", model.clone())),
        Work::Predict { model, output, .. } => {
            rows.extend([("model", model.clone()), ("predictions", output.clone())]);
        }
        Work::Train { export } => {
            let batch = match spec.options.batch {
                Batch::Global(records) => format!("{records} records per step, over all workers"),
                Batch::PerWorker(records) => format!("{records} records per step and worker"),
            };
            let most = spec
                .options
                .max_steps
                .map(|most| format!(", at most {most} steps"))
                .unwrap_or_default();
            rows.push(("steps", format!("{batch}{most}")));
            rows.push(("epochs", spec.options.epochs.to_string()));
            let checkpoints = spec.options.checkpoints.as_ref().map(|spec| {
                let every = match spec.every {
                    CheckpointEvery::Steps(steps) => format!("{steps} steps"),
                    CheckpointEvery::Time(time) => format!("{} s", time.as_secs_f64()),
                };
                format!("{}, every {every}, {} retained", spec.dir, spec.keep)
            });
            rows.push(("checkpoints", checkpoints.unwrap_or_else(|| "none".into())));
            let audit = f64::from(spec.options.audit) / 10_000.0;
            rows.extend((audit > 0.0).then(|| ("audit", format!("{audit} % of the steps"))));
            rows.extend(spec.options.resume_from.iter().map(|from| ("resume from", from.clone())));
            rows.extend(spec.options.validation.iter().map(|validation| {
                let text = match validation.split {
                    Some(split) => format!("{} % of the data", f64::from(split.get()) / 10.0),
                    None => validation.data.clone(),
                };
                ("validation", text)
            }));
            let best = spec.options.validation.iter().filter_map(|spec| spec.export_best.clone());
            rows.extend(best.map(|path| ("best model", path)));
            rows.extend(export.iter().map(|export| ("export", export.clone())));
        }
    }
    rows
}
