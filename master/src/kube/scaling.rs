//! Changes of the number of workers of a job, of its limits and of its weight, through its anchor.
//!
//! The task in the anchor stays as it was submitted. The keys that users set later say what has
//! changed since.

use elasticdl_proto::Status;

use super::anchor::{self, Data, DesiredState, MAX_WORKERS, MIN_WORKERS, NUM_WORKERS};
use super::objects::Task;
use super::priority_tiers::PriorityTiers;
use crate::job::{JobSpec, Scaling};

/// The task in `data`, with the limits of the number of workers and the weight that users have
/// requested since; `None` if there is none that this release can read.
#[must_use]
pub fn task(data: &Data) -> Option<Task> {
    let task = Task::in_anchor(data)?;
    let desired = DesiredState::read(data);
    let change = Scaling { num_workers: None, ..desired.scaling };
    // The master does not carry out what is impossible.
    let job = task.job.scaled(task.job.num_workers, change).unwrap_or(task.job);
    let priority_tiers = task
        .priority_tiers
        .map(|tiers| PriorityTiers { weight: desired.weight.unwrap_or(tiers.weight), ..tiers });
    Some(Task { job, priority_tiers, ..task })
}

/// A change of the number of workers, or of its limits, that is possible.
#[derive(Clone, Debug)]
pub struct Rescaling {
    /// The number of workers before.
    pub was: u32,
    /// The job with its new number of workers and limits.
    pub job: JobSpec,
    /// The keys of the anchor that request it.
    pub keys: Data,
}

/// Checks a change of the job `spec`, whose anchor has `data`.
///
/// # Errors
/// Why it is not possible.
pub fn rescale(data: &Data, spec: &JobSpec, change: Scaling) -> Result<Rescaling, String> {
    let desired = DesiredState::read(data);
    let (requested, status) = (desired.scaling.num_workers, anchor::status(data));
    let ends = |status: &Status| ["stopping", "ending"].contains(&&*status.state);
    if desired.stop.is_some() || status.as_ref().is_some_and(ends) {
        return Err(Scaling::ENDING.into());
    }
    let was = status.map(|status| status.workers_desired).or(requested);
    let was = was.unwrap_or(spec.num_workers);
    let job = spec.scaled(was, change)?;
    // A number that was requested before does not contradict the limits.
    let outside = requested.filter(|number| !job.limits().contains(number));
    let follows = outside.map(|number| number.clamp(job.min_workers, job.max_workers));
    let num_workers = change.num_workers.or(follows);
    let keys = [
        (NUM_WORKERS, num_workers),
        (MIN_WORKERS, change.min_workers),
        (MAX_WORKERS, change.max_workers),
    ];
    let given = |(key, number): (&str, Option<u32>)| Some((key.into(), number?.to_string()));
    let keys = keys.into_iter().filter_map(given).collect();
    Ok(Rescaling { was, job, keys })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::job::testing::spec;
    use crate::kube::anchor::{STOP, WEIGHT};
    use crate::kube::objects::TASK;

    #[test]
    fn a_change_takes_a_number_along_that_was_requested_before_and_its_job_is_read_again() {
        let job = JobSpec { max_workers: 8, ..spec() };
        let submitted = json!({
            "job": job, "master_timeout": {"secs": 30, "nanos": 0}, "metrics_port": 7071,
            "serve_metrics": false,
        });
        let mut data = Data::from([(TASK.into(), submitted.to_string())]);
        let limits = |min_workers, max_workers| {
            let [min_workers, max_workers] = [Some(min_workers), Some(max_workers)];
            Scaling { num_workers: None, min_workers, max_workers }
        };
        let numbers = |job: &JobSpec| [job.min_workers, job.num_workers, job.max_workers];
        let change = rescale(&data, &job, limits(4, 9)).unwrap();
        assert_eq!((change.was, numbers(&change.job)), (3, [4, 4, 9]));
        let keys = |keys: &Data| keys.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>();
        assert_eq!(keys(&change.keys), ["max-workers=9", "min-workers=4"]);
        data.extend(change.keys);
        data.insert(NUM_WORKERS.into(), "6".into());
        let job = task(&data).unwrap().job;
        assert_eq!(numbers(&job), [4, 4, 9]);
        let change = rescale(&data, &job, limits(1, 5)).unwrap();
        assert_eq!((change.was, numbers(&change.job)), (6, [1, 5, 5]));
        assert_eq!(keys(&change.keys), ["max-workers=5", "min-workers=1", "num-workers=5"]);
        assert!(rescale(&data, &job, limits(9, 5)).is_err());
        let stopped = [(STOP.to_owned(), "true".to_owned())].into_iter().chain(data.clone());
        assert_eq!(rescale(&stopped.collect(), &job, limits(1, 5)).unwrap_err(), Scaling::ENDING);
        // A user has edited the ConfigMap.
        data.insert(MIN_WORKERS.into(), "10".into());
        assert_eq!(numbers(&task(&data).unwrap().job), [1, 3, 8]);
        data.insert(WEIGHT.into(), "2".into());
        let light = task(&data).unwrap();
        assert_eq!(light.priority_tiers, None, "a job without tiers has no weight");
        let tiered = Task { priority_tiers: Some(PriorityTiers::shipped()), ..light };
        data.insert(TASK.into(), serde_json::to_string(&tiered).unwrap());
        assert_eq!(task(&data).unwrap().priority_tiers.unwrap().weight.to_string(), "2");
    }
}
