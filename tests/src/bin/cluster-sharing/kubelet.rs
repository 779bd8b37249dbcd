//! The stand-in for the nodes' kubelets: it starts a program for each pod that the scheduler binds
//! to a node, reports the pod's state to the API server as a kubelet does, and ends the program
//! when the pod is deleted.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use elasticdl_master::kube::objects::launch_and_slot;
use elasticdl_master::kube::watch::{Change, Selection, Watch};
use elasticdl_tests::print;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::job::Job;
use crate::masters::{self, Masters};
use crate::observed::{Observed, Owner, Stage, owner_of, stage_of};
use crate::worker::{self, Signal};

/// What all nodes share.
pub(crate) struct Nodes {
    client: Client,
    masters: Masters,
    /// Time from a pod's binding to its program's start.
    start: Duration,
    /// Records of each job.
    records: u64,
    runtime: Handle,
    jobs: Mutex<BTreeMap<String, Arc<Job>>>,
    observed: Mutex<Observed>,
    pods_started: AtomicU32,
}

/// A pod that was bound to a node.
struct BoundPod {
    nodes: Arc<Nodes>,
    pod: Pod,
    address: Ipv4Addr,
    started_at: String,
}

impl Nodes {
    pub(crate) fn new(
        client: Client,
        masters: Masters,
        start: Duration,
        records: u64,
        runtime: Handle,
    ) -> Arc<Self> {
        Arc::new(Self {
            client,
            masters,
            start,
            records,
            runtime,
            jobs: Mutex::default(),
            observed: Mutex::default(),
            pods_started: AtomicU32::new(0),
        })
    }

    /// The state of all pods.
    pub(crate) fn observed(&self) -> MutexGuard<'_, Observed> {
        self.observed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The job of this name.
    pub(crate) fn job(&self, name: &str) -> Arc<Job> {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(
            jobs.entry(name.into())
                .or_insert_with(|| Arc::new(Job::start(self.records, &self.runtime))),
        )
    }

    /// Follows the pods of the cluster, for ever.
    pub(crate) async fn run(self: Arc<Self>) {
        let mut watch = Watch::start(Api::<Pod>::all(self.client.clone()), Selection::default());
        let mut signals: BTreeMap<String, watch::Sender<Signal>> = BTreeMap::new();
        loop {
            match watch.next().await {
                Change::Applied(pod) => {
                    self.observed().apply(&pod, Instant::now());
                    self.follow(&mut signals, pod);
                }
                Change::Deleted(pod) => {
                    let uid = pod.metadata.uid.unwrap_or_default();
                    self.observed().remove(&uid);
                    if let Some(signal) = signals.remove(&uid) {
                        signal.send_replace(Signal::Kill);
                    }
                }
                Change::Listed(_, uids) => {
                    self.observed().retain(&uids);
                    signals.retain(|uid, signal| {
                        let exists = uids.contains(uid);
                        if !exists {
                            signal.send_replace(Signal::Kill);
                        }
                        exists
                    });
                }
                Change::Forbidden(why) => print(&format!("the pods can't be watched: {why}")),
            }
        }
    }

    /// Starts the program of a pod that has a node, or ends it.
    fn follow(self: &Arc<Self>, signals: &mut BTreeMap<String, watch::Sender<Signal>>, pod: Pod) {
        let Some(uid) = pod.metadata.uid.clone() else { return };
        let is_deleted = pod.metadata.deletion_timestamp.is_some();
        let grace = pod.metadata.deletion_grace_period_seconds.unwrap_or_default();
        let grace = Duration::from_secs(u64::try_from(grace).unwrap_or_default());
        let has_node = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
        if !signals.contains_key(&uid) && has_node {
            let number = self.pods_started.fetch_add(1, Ordering::Relaxed) + 1;
            let (signal, received) = watch::channel(Signal::Run);
            let address = masters::address(number);
            let started_at = Timestamp::now().to_string();
            // A pod of an earlier run of this program has no program any more.
            let is_new = matches!(stage_of(&pod), Stage::Starting);
            let bound = BoundPod { nodes: Arc::clone(self), pod, address, started_at };
            tokio::spawn(bound.run(number, is_new, received));
            signals.insert(uid.clone(), signal);
        }
        if let Some(signal) = signals.get(&uid).filter(|_| is_deleted) {
            let may = |now: &mut Signal| {
                let is_first = *now == Signal::Run;
                if is_first {
                    *now = Signal::Terminate(grace);
                }
                is_first
            };
            signal.send_if_modified(may);
        }
    }
}

impl BoundPod {
    async fn run(self, number: u32, is_new: bool, mut signal: watch::Receiver<Signal>) {
        if is_new {
            let start = tokio::time::sleep(self.nodes.start);
            let code = tokio::select! {
                () = start => self.run_program(number, signal.clone()).await,
                () = worker::deleted(&mut signal) => None,
            };
            let is_gone = *signal.borrow() == Signal::Kill;
            if let Some(code) = code.filter(|_| !is_gone) {
                self.report(&self.ended(code)).await;
            }
        }
        // The object of a deleted pod goes when its program has ended.
        worker::deleted(&mut signal).await;
        self.delete().await;
    }

    /// Runs the program to its end, and returns its exit code; `None` if it was not started.
    async fn run_program(&self, number: u32, mut signal: watch::Receiver<Signal>) -> Option<i32> {
        match owner_of(&self.pod) {
            Owner::Master(name) => {
                let masters = &self.nodes.masters;
                let prepared = masters.prepare(&self.nodes.client, &self.pod, &name, number).await;
                let master = prepared.map_err(|error| print(&format!("{name}: {error}"))).ok()?;
                self.nodes.job(&name).target.send_replace(Some(master.target.clone()));
                self.report(&self.running()).await;
                Some(master.run(signal).await)
            }
            Owner::Worker(name) => {
                let job = self.nodes.job(&name);
                self.report(&self.running()).await;
                let mut targets = job.target.subscribe();
                let target = targets.wait_for(Option::is_some).await.ok()?.clone()?;
                let (launch, _) = launch_and_slot(&self.pod)?;
                let address = (self.address, WORKER_PORT).into();
                Some(worker::run(target, launch, address, job, signal).await)
            }
            Owner::Placeholder | Owner::Service => {
                self.report(&self.running()).await;
                worker::deleted(&mut signal).await;
                Some(0)
            }
        }
    }

    fn running(&self) -> Value {
        let condition = |name: &str| json!({"type": name, "status": "True"});
        let conditions = ["Initialized", "Ready", "ContainersReady"].map(condition);
        self.status("Running", json!({"running": {"startedAt": self.started_at}}), &conditions)
    }

    fn ended(&self, code: i32) -> Value {
        let now = Timestamp::now().to_string();
        let condition = |name: &str| json!({"type": name, "status": "False"});
        let conditions = ["Ready", "ContainersReady"].map(condition);
        let (phase, reason) =
            if code == 0 { ("Succeeded", "Completed") } else { ("Failed", "Error") };
        let terminated = json!({
            "exitCode": code, "reason": reason, "startedAt": self.started_at, "finishedAt": now,
        });
        self.status(phase, json!({"terminated": terminated}), &conditions)
    }

    fn status(&self, phase: &str, state: Value, conditions: &[Value]) -> Value {
        let containers = self.pod.spec.iter().flat_map(|spec| &spec.containers);
        let containers = containers.map(|container| {
            json!({
                "name": container.name, "image": container.image, "imageID": "none",
                "ready": phase == "Running", "restartCount": 0, "state": state,
            })
        });
        json!({
            "metadata": {"uid": self.pod.metadata.uid},
            "status": {
                "phase": phase,
                "podIP": self.address,
                "podIPs": [{"ip": self.address}],
                "startTime": self.started_at,
                "conditions": conditions,
                "containerStatuses": containers.collect::<Vec<_>>(),
            },
        })
    }

    /// Reports the pod's state; tries again while the server does not answer.
    async fn report(&self, status: &Value) {
        let patch = Patch::Strategic(status);
        for _ in 0..ATTEMPTS {
            let name = self.pod.metadata.name.as_deref().unwrap_or_default();
            match self.api().patch_status(name, &PatchParams::default(), &patch).await {
                // The pod is gone, or another one has its name.
                Ok(_) | Err(kube::Error::Api(_)) => return,
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    async fn delete(&self) {
        let params = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(Preconditions {
                uid: self.pod.metadata.uid.clone(),
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        for _ in 0..ATTEMPTS {
            let name = self.pod.metadata.name.as_deref().unwrap_or_default();
            match self.api().delete(name, &params).await {
                Ok(_) | Err(kube::Error::Api(_)) => return,
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    fn api(&self) -> Api<Pod> {
        let namespace = self.pod.metadata.namespace.as_deref().unwrap_or_default();
        Api::namespaced(self.nodes.client.clone(), namespace)
    }
}

/// No worker listens: the ring between workers is simulated.
const WORKER_PORT: u16 = 9;
const ATTEMPTS: u32 = 20;
const PAUSE: Duration = Duration::from_millis(250);
