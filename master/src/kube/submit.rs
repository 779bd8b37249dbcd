//! Creates and deletes a job's objects.

use std::time::Duration;

use k8s_openapi::api::authorization::v1::{
    LocalSubjectAccessReview, ResourceAttributes, SubjectAccessReviewSpec,
};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret, ServiceAccount};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::anchor;
use super::client::{Cluster, ClusterError, is_code, with_hint};
use super::gang::GangOptions;
use super::master_pods::{self, Creation, SUBMISSION_MAX, is_cut_off};
use super::objects::{self, Access, Objects, Request};
use super::options::PodOptions;
use super::priority_tiers::{MASTER_CLASS, TierChoice};
use super::retry::{retry, say};

/// Permissions that the master needs in its namespace, as in manifests/rbac.yaml: API group,
/// resource, verbs.
pub const MASTER_RULES: [(&str, &str, &[&str]); 6] = [
    ("", "configmaps", &["get", "list", "watch", "create", "patch"]),
    ("", "events", &["create", "list", "patch"]),
    ("", "pods", &["get", "list", "watch", "create", "delete"]),
    ("", "services", &["get", "create"]),
    ("batch", "jobs", &["get", "patch"]),
    ("coordination.k8s.io", "leases", &["get", "create", "update"]),
];

/// Creates the objects of a job: all of them, or none. Returns what the master's pod waits for, if
/// the cluster says so at once.
///
/// # Errors
/// A job of this name exists, a permission is missing, or the cluster refuses an object or the
/// master's pod. What was created is deleted then.
pub async fn submit(
    cluster: &Cluster,
    request: &Request,
    mut objects: Objects,
) -> Result<Option<String>, ClusterError> {
    let name = &request.task.job.name;
    if !request.pods.per_job_role {
        let account = &request.pods.service_account;
        check_service_account(cluster, account, &MASTER_RULES).await?;
        check_gang_rights(cluster, account, request.task.gang.as_ref()).await?;
    }
    check_references(cluster, &request.pods).await?;
    prefer_master_class(cluster, request, &mut objects.job).await;
    let jobs: Api<Job> = cluster.api();
    let job = create_job(cluster, name, &objects.job).await?;
    let created = match create_rest(cluster, name, &mut objects, &job.metadata).await {
        Ok(()) => await_master(cluster, name, &job.metadata).await,
        Err(error) => Err(error),
    };
    if created.is_err() {
        // The garbage collector deletes the objects that the Job owns already.
        let params =
            DeleteParams { preconditions: this_very(&job.metadata), ..DeleteParams::background() };
        if let Err(error) = jobs.delete(&objects::master_name(name), &params).await {
            warn!(%error, "the objects that were created can't be deleted");
        }
    }
    created
}

/// Creates the Job of the master. A job of its name that was refused gives way.
async fn create_job(cluster: &Cluster, name: &str, job: &Job) -> Result<Job, ClusterError> {
    let mut job = job.clone();
    let own = getrandom::u64().ok().map(|own| own.to_string());
    job.annotations_mut().extend(own.clone().map(|own| (SUBMISSION.into(), own)));
    let is_own = |found: &Job| own.is_some() && found.annotations().get(SUBMISSION) == own.as_ref();
    let create = async || create_once(cluster, &job, "the master's job", is_own).await;
    let mut created = create().await?;
    if created.is_none() && is_refused(cluster, name).await {
        say(&format!("the job {name} that was refused before is deleted: it has trained nothing"));
        delete(cluster, name).await?;
        created = create().await?;
    }
    match created {
        Some(job) => Ok(job),
        None => Err(already(cluster, name).await),
    }
}

/// Whether the input of the job of this name was refused.
async fn is_refused(cluster: &Cluster, name: &str) -> bool {
    let anchors: Api<ConfigMap> = cluster.api();
    let anchor = anchors.get_opt(name).await.ok().flatten();
    anchor.and_then(|anchor| anchor.data).is_some_and(|data| was_refused(&data))
}

/// Whether a job with this anchor has ended without a step, because its input was refused.
pub(super) fn was_refused(data: &anchor::Data) -> bool {
    // Another release may have written it.
    let summary = data.get(anchor::SUMMARY).map(|text| serde_json::from_str(text));
    let summary: Value = summary.and_then(Result::ok).unwrap_or_default();
    summary["state"] == "refused" && summary["steps"] == 0
}

/// Waits until the Job has created the master's pod, within a limit. A quota that is exhausted is
/// waited for; any other refusal is one of the pod as it is.
async fn await_master(
    cluster: &Cluster,
    name: &str,
    job: &ObjectMeta,
) -> Result<Option<String>, ClusterError> {
    let deadline = Instant::now() + MASTER_WAIT;
    while Instant::now() < deadline {
        match master_pods::creation(cluster, name, job.uid.as_deref().unwrap_or_default()).await {
            Creation::Created => return Ok(None),
            Creation::Refused(message) if is_quota_exhausted(&message) => return Ok(Some(message)),
            Creation::Refused(message) => {
                return Err(ClusterError::Refused {
                    doing: "create the master's pod".into(),
                    message: with_hint(&message),
                });
            }
            Creation::Unknown => tokio::time::sleep(GONE_INTERVAL).await,
        }
    }
    Ok(None)
}

fn is_quota_exhausted(message: &str) -> bool {
    message.contains("exceeded quota")
}

async fn create_rest(
    cluster: &Cluster,
    name: &str,
    objects: &mut Objects,
    job: &ObjectMeta,
) -> Result<(), ClusterError> {
    objects.own_anchor(job);
    let anchor = create(cluster, &objects.anchor, "ConfigMap").await?;
    objects.own_rest(&anchor.metadata);
    create(cluster, &objects.secret, "Secret").await?;
    create(cluster, &objects.service, "Service").await?;
    for policy in &objects.network_policies {
        create(cluster, policy, "NetworkPolicy").await.map_err(|error| {
            advise(error, "--no-network-policy submits the job without network policies")
        })?;
    }
    if let Some(Access { account, role, binding }) = &objects.access {
        let why = "--per-job-role needs the rights in manifests/rbac-per-job.yaml";
        create(cluster, account, "ServiceAccount").await.map_err(|error| advise(error, why))?;
        create(cluster, role, "Role").await.map_err(|error| advise(error, why))?;
        create(cluster, binding, "RoleBinding").await.map_err(|error| advise(error, why))?;
    }
    let jobs: Api<Job> = cluster.api();
    let go = Patch::Merge(json!({"spec": {"parallelism": 1}}));
    let (master, doing) = (objects::master_name(name), "start the master's job");
    let start = async || {
        let patched = jobs.patch(&master, &PatchParams::default(), &go).await;
        patched.map(drop).map_err(|error| cluster.explain(doing, error))
    };
    retry(doing, start).await
}

/// Adds advice to an error about a missing right of the user.
fn advise(error: ClusterError, advice: &str) -> ClusterError {
    match error {
        ClusterError::Forbidden { doing, message, .. } => {
            ClusterError::Refused { doing, message: format!("{message}; {advice}") }
        }
        error => error,
    }
}

async fn create<K: Object>(cluster: &Cluster, object: &K, kind: &str) -> Result<K, ClusterError> {
    let name = object.meta().name.clone().unwrap_or_default();
    // No other submission has an owner of this uid.
    let is_own = |found: &K| found.owner_references() == object.owner_references();
    let created = create_once(cluster, object, &format!("the {kind} {name}"), is_own).await?;
    created.ok_or_else(|| {
        ClusterError::Exists(format!(
            "the namespace {} has a {kind} {name} already, which is not this job's; \
             remove it, or give the job another name",
            cluster.namespace
        ))
    })
}

/// Creates an object, and tries again while the server can't answer. An earlier try whose answer
/// was lost may have created it: the object that is there then `is_own`. Returns `None` if another
/// object has its name.
async fn create_once<K: Object>(
    cluster: &Cluster,
    object: &K,
    what: &str,
    is_own: impl Fn(&K) -> bool,
) -> Result<Option<K>, ClusterError> {
    let api: Api<K> = cluster.api();
    let doing = format!("create {what}");
    let create = async || {
        let answer = match api.create(&PostParams::default(), object).await {
            Err(error) if is_code(&error, 409) => match api.get_opt(&object.name_any()).await {
                // Users who may create Secrets need not have permission to read them.
                Err(error) if is_code(&error, 403) => Ok(None),
                found => found.map(|found| found.filter(&is_own)),
            },
            created => created.map(Some),
        };
        answer.map_err(|error| cluster.explain(&doing, error))
    };
    retry(&doing, create).await
}

/// Gives the master its priority class if the cluster has the class. A dry run checks that first,
/// because a Job with an unknown class would never start.
async fn prefer_master_class(cluster: &Cluster, request: &Request, job: &mut Job) {
    let Some(spec) = job.spec.as_mut().and_then(|job| job.template.spec.as_mut()) else { return };
    if request.pods.priority_tiers != TierChoice::Auto || spec.priority_class_name.is_some() {
        return;
    }
    let mut with_class = spec.clone();
    with_class.priority_class_name = Some(MASTER_CLASS.into());
    let metadata = ObjectMeta {
        generate_name: Some(format!("{}-", objects::master_name(&request.task.job.name))),
        ..ObjectMeta::default()
    };
    let pod = Pod { metadata, spec: Some(with_class.clone()), status: None };
    let pods: Api<Pod> = cluster.api();
    match pods.create(&PostParams { dry_run: true, ..PostParams::default() }, &pod).await {
        Ok(_) => *spec = with_class,
        Err(error) => debug!(%error, "the master gets no priority class"),
    }
}

/// Deletes a job with all its objects, and waits until they are gone.
///
/// # Errors
/// There is no such job, or [`ClusterError`].
pub async fn delete(cluster: &Cluster, name: &str) -> Result<(), ClusterError> {
    let jobs: Api<Job> = cluster.api();
    let doing = "delete the job";
    let absent =
        || ClusterError::NoSuchJob { job: name.into(), namespace: cluster.namespace.clone() };
    let master = objects::master_name(name);
    let anchors: Api<ConfigMap> = cluster.api();
    let read = async || jobs.get_opt(&master).await.map_err(|e| cluster.explain(doing, e));
    let job = retry(doing, read).await?.map(|job| job.metadata);
    let read = async || anchors.get_opt(name).await.map_err(|e| cluster.explain(doing, e));
    let anchor = retry(doing, read).await?.map(|anchor| anchor.metadata);
    let is_ours = |meta: &ObjectMeta| {
        meta.labels.iter().flatten().any(|(k, v)| k == "elasticdl/job" && v == name)
    };
    let params =
        |meta| DeleteParams { preconditions: this_very(meta), ..DeleteParams::background() };
    let (job, ours) = (job.filter(is_ours), anchor.as_ref().filter(|meta| is_ours(meta)));
    let delete = async || {
        let deleted = match (&job, ours) {
            (Some(job), _) => jobs.delete(&master, &params(job)).await.map(drop),
            // A user has deleted the Job and left what it owns.
            (None, Some(anchor)) => anchors.delete(name, &params(anchor)).await.map(drop),
            (None, None) => return Err(absent()),
        };
        match deleted {
            // Another client deleted it first, or this one, whose answer was lost.
            Err(error) if !is_code(&error, 404) && !is_code(&error, 409) => {
                Err(cluster.explain(doing, error))
            }
            _ => Ok(()),
        }
    };
    retry(doing, delete).await?;
    wait_until_gone(cluster, name).await
}

async fn wait_until_gone(cluster: &Cluster, name: &str) -> Result<(), ClusterError> {
    let pods: Api<Pod> = cluster.api();
    let anchors: Api<ConfigMap> = cluster.api();
    let start = Instant::now();
    let deadline = start + GONE_TIMEOUT;
    // The workers may be left without the ConfigMap, whose uid selects them otherwise.
    let params = ListParams::default().labels(&format!("{}={name}", objects::JOB_LABEL));
    let mut was_said = false;
    loop {
        let doing = "list what is left of the job";
        let read = async || anchors.get_opt(name).await.map_err(|e| cluster.explain(doing, e));
        let anchor = retry(doing, read).await?;
        let mut left: Vec<String> =
            anchor.map(|_| format!("ConfigMap {name}")).into_iter().collect();
        let read = async || pods.list(&params).await.map_err(|e| cluster.explain(doing, e));
        left.extend(retry(doing, read).await?.items.iter().filter_map(name_and_node));
        if left.is_empty() {
            return Ok(());
        }
        if !was_said && start.elapsed() >= SAID_AFTER {
            was_said = true;
            say(&format!(
                "waiting up to {} s for what is left of the job (a pod of a node that does not \
                 answer stays until its node does, or is removed): {}",
                GONE_TIMEOUT.as_secs(),
                left.join(", ")
            ));
        }
        if Instant::now() >= deadline {
            let message =
                format!("it has been deleted, and these are still there: {}", left.join(", "));
            return Err(ClusterError::Refused {
                doing: "wait any longer for the job's end".into(),
                message,
            });
        }
        tokio::time::sleep(GONE_INTERVAL).await;
    }
}

fn name_and_node(pod: &Pod) -> Option<String> {
    let name = pod.metadata.name.as_ref()?;
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
    Some(node.map_or_else(|| format!("pod {name}"), |node| format!("pod {name} on node {node}")))
}

/// Checks, as far as the user's permissions allow, that the master will have its permissions.
async fn check_service_account(
    cluster: &Cluster,
    name: &str,
    rules: &[(&str, &str, &[&str])],
) -> Result<(), ClusterError> {
    let namespace = &cluster.namespace;
    let accounts: Api<ServiceAccount> = cluster.api();
    match accounts.get_opt(name).await {
        Ok(Some(_)) => {}
        Ok(None) => {
            return Err(ClusterError::Forbidden {
                doing: format!("run the master as the service account {name}"),
                message: format!(
                    "there is none in the namespace {namespace}, if that exists \
                     (see --service-account)"
                ),
                namespace: namespace.clone(),
            });
        }
        // Permission to create jobs does not imply permission to read service accounts.
        Err(error) => debug!(%error, "the service account can't be read"),
    }
    let mut reviews = JoinSet::new();
    for (group, resource, verbs) in rules {
        for verb in *verbs {
            let review = review(namespace, name, group, resource, verb);
            let api: Api<LocalSubjectAccessReview> = cluster.api();
            let right = format!("{verb} {resource}");
            reviews.spawn(async move {
                let answer = api.create(&PostParams::default(), &review).await.ok()?.status?;
                // A missing answer is no refusal: the user may not have permission to ask.
                (!answer.allowed && answer.evaluation_error.is_none()).then_some(right)
            });
        }
    }
    let mut missing: Vec<String> = reviews.join_all().await.into_iter().flatten().collect();
    missing.sort();
    if missing.is_empty() {
        return Ok(());
    }
    Err(ClusterError::Forbidden {
        doing: format!("run the master as the service account {name}"),
        message: format!("in the namespace {namespace} it may not: {}", missing.join(", ")),
        namespace: namespace.clone(),
    })
}

/// Checks, as far as the user's permissions allow, that the master may create its PodGroups.
async fn check_gang_rights(
    cluster: &Cluster,
    account: &str,
    gang: Option<&GangOptions>,
) -> Result<(), ClusterError> {
    let Some(scheduler) = gang.map(|gang| gang.scheduler) else { return Ok(()) };
    let Some(rule) = scheduler.master_rule() else { return Ok(()) };
    let name = scheduler.name();
    check_service_account(cluster, account, &[rule]).await.map_err(|error| {
        advise(error, &format!("--scheduler {name} needs manifests/schedulers/{name}.yaml"))
    })
}

/// Checks, as far as the user's permissions allow, that the objects exist to which worker pods
/// refer. The content of Secrets is not read.
async fn check_references(cluster: &Cluster, pods: &PodOptions) -> Result<(), ClusterError> {
    let missing = |option: &'static str, kind: &'static str, name: &str| ClusterError::Missing {
        option,
        kind,
        name: name.into(),
        namespace: cluster.namespace.clone(),
    };
    let accounts: Api<ServiceAccount> = cluster.api();
    if let Some(name) = &pods.worker_service_account
        && let Ok(None) = accounts.get_metadata_opt(name).await
    {
        return Err(missing("--worker-service-account", "service account", name));
    }
    let secrets: Api<Secret> = cluster.api();
    for name in pods.env_from_secret.iter().map(|from| &from.secret) {
        if let Ok(None) = secrets.get_metadata_opt(name).await {
            return Err(missing("--env-from-secret", "Secret", name));
        }
    }
    Ok(())
}

fn review(
    namespace: &str,
    account: &str,
    group: &str,
    resource: &str,
    verb: &str,
) -> LocalSubjectAccessReview {
    LocalSubjectAccessReview {
        metadata: ObjectMeta { namespace: Some(namespace.into()), ..ObjectMeta::default() },
        spec: SubjectAccessReviewSpec {
            user: Some(format!("system:serviceaccount:{namespace}:{account}")),
            groups: Some(vec![
                "system:serviceaccounts".into(),
                format!("system:serviceaccounts:{namespace}"),
                "system:authenticated".into(),
            ]),
            resource_attributes: Some(ResourceAttributes {
                group: Some(group.into()),
                namespace: Some(namespace.into()),
                resource: Some(resource.into()),
                verb: Some(verb.into()),
                ..ResourceAttributes::default()
            }),
            ..SubjectAccessReviewSpec::default()
        },
        status: None,
    }
}

/// The error for the name of another job, or of what is left of one.
async fn already(cluster: &Cluster, name: &str) -> ClusterError {
    let (jobs, anchors): (Api<Job>, Api<ConfigMap>) = (cluster.api(), cluster.api());
    let job = jobs.get_opt(&objects::master_name(name)).await.ok().flatten();
    let lacks_anchor = matches!(anchors.get_opt(name).await, Ok(None));
    let now = cluster.now().await;
    let is_left = |job: &Job| {
        is_cut_off(job, now) || (lacks_anchor && anchor::age(&job.metadata, now) >= SUBMISSION_MAX)
    };
    let namespace = &cluster.namespace;
    if job.as_ref().is_some_and(is_left) {
        return ClusterError::Exists(format!(
            "the namespace {namespace} has a part of a job {name}, whose submission was cut off or \
             whose ConfigMap was deleted; remove it with \
             `elasticdl delete {name} --namespace {namespace}`, or choose another --job-name"
        ));
    }
    ClusterError::Exists(format!(
        "a job {name} exists already in the namespace {namespace}; inspect it with \
         `elasticdl status {name} --namespace {namespace}`, remove it with \
         `elasticdl delete {name} --namespace {namespace}`, or choose another --job-name"
    ))
}

fn this_very(meta: &ObjectMeta) -> Option<Preconditions> {
    Some(Preconditions { uid: meta.uid.clone(), resource_version: None })
}

/// What [`submit`] creates.
trait Object:
    kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
    + Clone
    + std::fmt::Debug
    + serde::Serialize
    + serde::de::DeserializeOwned
{
}

impl<K> Object for K where
    K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::Serialize
        + serde::de::DeserializeOwned
{
}

/// Annotation of a Job: a name of the call of [`submit`] that has created it.
const SUBMISSION: &str = "elasticdl/submission";
/// The Job controller usually creates the pod within a second.
const MASTER_WAIT: Duration = Duration::from_secs(5);
const GONE_INTERVAL: Duration = Duration::from_millis(200);
/// Time after which the user is told what is waited for.
const SAID_AFTER: Duration = Duration::from_secs(5);
/// Kubelets take up to 90 s to report that a pod which has ended by itself is deleted.
const GONE_TIMEOUT: Duration = Duration::from_secs(180);

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::testing::FakeServer;
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_name_of_a_job_that_was_refused_is_free_and_that_of_another_is_not() {
        let (fake, cluster) = FakeServer::start();
        let labels = json!({"elasticdl/job": "j"});
        let metadata = |name: &str| json!({"name": name, "uid": name, "labels": labels});
        let template = json!({"spec": {"containers": []}});
        let job = json!({"metadata": metadata("j-master"), "spec": {"template": template}});
        fake.put("jobs", "j-master", job.clone());
        let new: Job = serde_json::from_value(job).unwrap();
        let ended = |state: &str, steps: u64| {
            let summary = json!({"state": state, "steps": steps}).to_string();
            let data = json!({"summary": summary});
            fake.put("configmaps", "j", json!({"metadata": metadata("j"), "data": data}));
        };
        for (state, steps) in [("failed", 0), ("completed", 9)] {
            ended(state, steps);
            let error = create_job(&cluster, "j", &new).await.unwrap_err();
            assert!(matches!(error, ClusterError::Exists(_)), "{state}: {error}");
        }
        ended("refused", 0);
        let collected = Arc::clone(&fake);
        tokio::spawn(async move {
            while collected.state().deleted.is_empty() {
                tokio::time::sleep(GONE_INTERVAL).await;
            }
            collected.remove_config_map("j");
        });
        create_job(&cluster, "j", &new).await.unwrap();
        assert_eq!(fake.state().deleted, ["j-master"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_job_is_deleted_although_the_server_fails_to_answer_some_calls() {
        let (fake, cluster) = FakeServer::start();
        let metadata = json!({"name": "j", "uid": "u", "labels": {"elasticdl/job": "j"}});
        fake.put("configmaps", "j", json!({"metadata": metadata}));
        for call in ["DELETE configmaps", "GET configmaps", "LIST pods"] {
            fake.state().throttles.extend([(call, 500, 0); 2]);
        }
        delete(&cluster, "j").await.unwrap();
        let left = fake.state().throttles.len();
        assert_eq!((left, &*fake.state().deleted), (0, &["j".to_owned()][..]));
        assert!(matches!(delete(&cluster, "j").await, Err(ClusterError::NoSuchJob { .. })));
    }

    #[tokio::test(start_paused = true)]
    async fn objects_are_created_once_although_the_server_fails_or_its_answers_are_lost() {
        let (fake, cluster) = FakeServer::start();
        let spec = json!({"template": {"spec": {"containers": []}}});
        let job = json!({"metadata": {"name": "j-master"}, "spec": spec});
        let job: Job = serde_json::from_value(job).unwrap();
        fake.state().throttles.extend([("POST jobs", 500, 0); 2]);
        fake.state().lost = 1;
        create_job(&cluster, "j", &job).await.unwrap();
        let other = create_job(&cluster, "j", &job).await.unwrap_err();
        assert!(matches!(other, ClusterError::Exists(_)), "{other}");
        let secret = |uid: &str| {
            let owner = json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "j", "uid": uid});
            let metadata = json!({"name": "s", "ownerReferences": [owner]});
            serde_json::from_value::<Secret>(json!({"metadata": metadata})).unwrap()
        };
        fake.state().lost = 1;
        create(&cluster, &secret("mine"), "Secret").await.unwrap();
        let other = create(&cluster, &secret("another"), "Secret").await.unwrap_err();
        assert!(other.to_string().contains("which is not this job's"), "{other}");
    }

    #[tokio::test]
    async fn the_name_of_a_part_of_a_job_is_refused_with_the_advice_to_delete_it() {
        let (fake, cluster) = FakeServer::start();
        let job = |parallelism: u32| {
            let metadata = json!({"name": "j-master", "creationTimestamp": "2024-05-01T10:00:00Z"});
            let template = json!({"spec": {"containers": []}});
            let spec = json!({"parallelism": parallelism, "template": template});
            json!({"metadata": metadata, "spec": spec})
        };
        let told = async || already(&cluster, "j").await.to_string();
        fake.put("jobs", "j-master", job(1));
        assert!(told().await.contains("has a part of a job j"), "without its ConfigMap");
        fake.put("configmaps", "j", json!({"metadata": {"name": "j"}}));
        assert!(told().await.contains("a job j exists already"));
        fake.put("jobs", "j-master", job(0));
        let cut_off = told().await;
        assert!(
            cut_off.contains("was cut off")
                && cut_off.contains("`elasticdl delete j --namespace ns`"),
            "{cut_off}"
        );
    }
}
