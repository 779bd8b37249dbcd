//! The two cases: what happens when, and what is measured.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticdl_tests::cluster::{Namespace, must};
use elasticdl_tests::print;
use tokio::runtime::Handle;

use crate::figures::Figures;
use crate::group::RECORDS_PER_RANK;
use crate::kubelet::Nodes;
use crate::nodes;
use crate::service::Service;
use crate::{Fault, Options};

/// A cluster in which cases are run.
#[derive(Clone)]
pub(crate) struct Cluster {
    pub(crate) client: kube::Client,
    pub(crate) nodes: Arc<Nodes>,
    pub(crate) machines: nodes::Nodes,
    /// The runtime of the nodes.
    pub(crate) runtime: Handle,
}

/// A case while it runs.
struct Case<'a> {
    cluster: &'a Cluster,
    options: &'a Options,
    namespace: Namespace,
    /// Names of its jobs, in the order of their submission.
    jobs: Vec<String>,
}

/// Workers of a job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// CPUs of each.
    pub(crate) cpus: u32,
    pub(crate) least: u32,
    pub(crate) most: u32,
}

impl Shape {
    /// The command that submits a job, with a weight if it has one.
    pub(crate) fn submission(
        self,
        namespace: &Namespace,
        job: &str,
        weight: Option<f64>,
    ) -> Command {
        let Self { cpus, least, most } = self;
        let (least, most) = (least.to_string(), most.to_string());
        let cpus = format!("cpu={cpus},memory=1Gi");
        let batch = RECORDS_PER_RANK.to_string();
        let mut command = namespace.elasticdl("train", ["--job-name", job, "--detach"]);
        command
            .args(["--image", "none", "--training-data", "none", "--minibatch-size", &batch])
            .args(["--num-workers", &most, "--min-workers", &least, "--max-workers", &most])
            .args(["--worker-resources", &cpus, "--master-resources", "cpu=100m,memory=64Mi"])
            .args(["--grace-period", "10s", "--worker-timeout", "60s"]);
        if let Some(weight) = weight {
            command.args(["--weight", &weight.to_string()]);
        }
        command.args(["--", "none"]);
        command
    }
}

impl Cluster {
    /// Runs a future on the nodes' runtime.
    pub(crate) fn block_on<T: Send + 'static>(
        &self,
        future: impl Future<Output = Result<T, Fault>> + Send + 'static,
    ) -> Result<T, Fault> {
        let (sender, result) = std::sync::mpsc::channel();
        self.runtime.spawn(async move { sender.send(future.await) });
        result.recv().map_err(|_| "the nodes' runtime has ended")?
    }

    /// Makes a namespace in which jobs can be submitted.
    pub(crate) fn namespace(&self, name: &str) -> Result<Namespace, Fault> {
        let exe = std::env::current_exe()?;
        let namespace = Namespace::new(&format!("sharing-{name}"), exe);
        namespace.apply_rbac();
        namespace.apply_shipped("priorityclasses.yaml");
        // Pods can be created when the namespace's own account exists.
        let deadline = Instant::now() + END_TIMEOUT;
        while namespace.get("serviceaccounts", "").len() < 2 {
            if Instant::now() >= deadline {
                return Err("the namespace gets no service account".into());
            }
            std::thread::sleep(POLL);
        }
        Ok(namespace)
    }

    /// Deletes a namespace, and waits until the nodes have ended its pods.
    pub(crate) fn delete(&self, namespace: Namespace) {
        let name = namespace.name().to_owned();
        drop(namespace);
        let deadline = Instant::now() + END_TIMEOUT;
        while self.nodes.observed().pods_of(&name) > 0 && Instant::now() < deadline {
            std::thread::sleep(POLL);
        }
    }

    /// Runs a case: 1, or 2 with the service.
    pub(crate) fn run(&self, options: &Options, number: u8) -> Result<Figures, Fault> {
        let namespace = self.namespace(&number.to_string())?;
        let jobs = (1..=options.jobs).map(|job| format!("case{number}-{job:02}")).collect();
        let case = Case { cluster: self, options, namespace, jobs };
        let figures = case.run(number == 2);
        self.delete(case.namespace);
        figures
    }
}

impl Case<'_> {
    fn run(&self, with_service: bool) -> Result<Figures, Fault> {
        let (client, name) = (self.cluster.client.clone(), self.namespace.name().to_owned());
        let machines = self.cluster.machines;
        self.cluster.block_on(async move { machines.fill(&client, &name).await })?;
        let mut service = None;
        let (high, low) = self.options.demand();
        if with_service {
            let new = Service::new(self.cluster.client.clone(), self.namespace.name());
            service = Some(self.scale(new, high)?.0);
        }
        let taken_before = self.cluster.nodes.observed().workers_taken;
        let begin = Instant::now();
        let submitted = self.submit_all(begin)?;
        std::thread::sleep(self.options.settle);
        let mut service_back_s = None;
        if let Some(service) = service {
            let (service, _) = self.scale(service, low)?;
            std::thread::sleep(self.options.settle);
            service_back_s = self.scale(service, high)?.1;
            std::thread::sleep(self.options.settle);
        }
        let seconds = begin.elapsed().as_secs_f64();
        let observed = self.cluster.nodes.observed();
        let workers_end =
            self.jobs.iter().map(|job| observed.workers(job).running).collect::<Vec<_>>();
        let ran = |(job, &at): (&String, &Instant)| {
            let ran_at = observed.ran_at(job, MIN_WORKERS)?;
            Some(ran_at.saturating_duration_since(at).as_secs_f64())
        };
        let pending_s = self.jobs.iter().zip(&submitted).map(ran).collect();
        let workers_taken = observed.workers_taken - taken_before;
        drop(observed);
        let calls = crate::calls::of(self.namespace.name());
        let records_lost = self.stop_all()?;
        Ok(Figures {
            seconds,
            pending_s,
            workers_end,
            workers_taken,
            service_back_s,
            has_service: with_service,
            records_lost,
            calls,
        })
    }

    /// Submits the jobs in sequence. Returns when the submission of each began.
    fn submit_all(&self, begin: Instant) -> Result<Vec<Instant>, Fault> {
        let least = MIN_WORKERS as u32;
        let shape = Shape { cpus: WORKER_CPUS, least, most: self.options.max_workers };
        std::thread::scope(|scope| {
            let submissions: Vec<_> = (0u32..)
                .zip(&self.jobs)
                .map(|(number, job)| {
                    let at = begin + self.options.interval * number;
                    std::thread::sleep(at.saturating_duration_since(Instant::now()));
                    let submitted = Instant::now();
                    (
                        submitted,
                        scope
                            .spawn(move || must(&mut shape.submission(&self.namespace, job, None))),
                    )
                })
                .collect();
            let join =
                |(submitted, submission): (Instant, std::thread::ScopedJoinHandle<'_, _>)| {
                    submission.join().map_err(|_| "a job could not be submitted")?;
                    Ok::<_, Fault>(submitted)
                };
            submissions.into_iter().map(join).collect()
        })
    }

    /// Scales the service. Returns how long it took until so many of its pods ran; `None` if they
    /// did not in time.
    fn scale(&self, service: Service, count: usize) -> Result<(Service, Option<f64>), Fault> {
        let begin = Instant::now();
        let service = self.cluster.block_on(service.scale(count))?;
        while self.cluster.nodes.observed().service().running != count {
            if begin.elapsed() >= SCALE_TIMEOUT {
                return Ok((service, None));
            }
            std::thread::sleep(SCALE_POLL);
        }
        Ok((service, Some(begin.elapsed().as_secs_f64())))
    }

    /// Stops all jobs, a few at a time, as each stop and each look at a summary is a process of
    /// this machine. Returns the records that were trained and that the jobs' summaries lack.
    fn stop_all(&self) -> Result<u64, Fault> {
        let mut lost = 0;
        for jobs in self.jobs.chunks(STOPS_AT_ONCE) {
            lost += std::thread::scope(|scope| {
                let stops: Vec<_> =
                    jobs.iter().map(|job| scope.spawn(move || self.stop(job))).collect();
                stops.into_iter().try_fold(0, |lost, stop| {
                    Ok::<_, Fault>(lost + stop.join().map_err(|_| "a job could not be stopped")?)
                })
            })?;
        }
        Ok(lost)
    }

    fn stop(&self, job: &str) -> u64 {
        let totals = || self.cluster.nodes.job(job).totals();
        let stopped = self.namespace.elasticdl("stop", [job]).output();
        let deadline = Instant::now() + END_TIMEOUT;
        let summary = loop {
            match self.namespace.summary(job) {
                Some(summary) => break Some(summary),
                None if Instant::now() >= deadline => break None,
                None => std::thread::sleep(POLL),
            }
        };
        if summary.is_none() {
            let output = stopped.map(|output| String::from_utf8_lossy(&output.stderr).into_owned());
            print(&format!("{job}: no summary after {END_TIMEOUT:?}; stop: {output:?}"));
        }
        let counted = summary.as_ref().map_or(0, |summary| summary.records.counted);
        if let Some(error) = summary.and_then(|summary| summary.error) {
            print(&format!("{job}: {error}"));
        }
        totals().lost + totals().committed.saturating_sub(counted)
    }
}

/// CPUs of a worker.
pub(crate) const WORKER_CPUS: u32 = 5;
/// The workers without which a job does not train.
pub(crate) const MIN_WORKERS: usize = 2;
const POLL: Duration = Duration::from_millis(500);
const SCALE_POLL: Duration = Duration::from_millis(20);
const SCALE_TIMEOUT: Duration = Duration::from_secs(180);
const STOPS_AT_ONCE: usize = 8;
const END_TIMEOUT: Duration = Duration::from_secs(120);
