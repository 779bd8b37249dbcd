//! A service account of a job's own, with the rights of its master.

use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::rbac::v1::{PolicyRule, Role, RoleBinding, RoleRef, Subject};

use super::metadata::metadata;
use super::names::{address_name, master_name};
use super::request::Request;

/// The service account of a job's master, and its rights.
#[derive(Clone, Debug, PartialEq)]
pub struct Access {
    /// Service account; a role binding refers to it by name.
    pub account: ServiceAccount,
    /// Rights of the account.
    pub role: Role,
    /// Binds the rights to the account.
    pub binding: RoleBinding,
}

impl Access {
    /// Builds the account and its rights, if the request asks for them.
    pub(super) fn new(request: &Request) -> Option<Self> {
        if !request.pods.per_job_role {
            return None;
        }
        let job = &request.task.job.name;
        let name = master_name(job);
        let metadata = metadata(request, &name, "master");
        let account = ServiceAccount { metadata: metadata.clone(), ..ServiceAccount::default() };
        let mut rules = rules(job);
        let gang = request.task.gang.as_ref().and_then(|gang| gang.scheduler.master_rule());
        rules.extend(gang.map(|(group, resource, verbs)| rule(group, resource, verbs, &[])));
        let role = Role { metadata: metadata.clone(), rules: Some(rules) };
        let binding = RoleBinding {
            metadata,
            role_ref: RoleRef { api_group: GROUP.into(), kind: "Role".into(), name: name.clone() },
            subjects: Some(vec![Subject {
                kind: "ServiceAccount".into(),
                name,
                namespace: Some(request.namespace.clone()),
                api_group: None,
            }]),
        };
        Some(Self { account, role, binding })
    }
}

/// Returns the name of the service account of a job's master.
pub(super) fn account_name(request: &Request) -> String {
    if request.pods.per_job_role {
        master_name(&request.task.job.name)
    } else {
        request.pods.service_account.clone()
    }
}

/// Rights of the master of `job`: those of [`MASTER_RULES`](crate::kube::submit::MASTER_RULES), on
/// its own objects where the names of objects are known. The names of pods, Events and of the parts
/// of a long file list are not, and creations can't be limited to names.
fn rules(job: &str) -> Vec<PolicyRule> {
    let master = master_name(job);
    let address = address_name(job);
    let leases = "coordination.k8s.io";
    vec![
        rule("", "configmaps", &["get", "create"], &[]),
        rule("", "configmaps", &["list", "watch"], &[job]),
        rule("", "configmaps", &["patch"], &[job, &address]),
        rule("", "events", &["create", "list", "patch"], &[]),
        rule("", "pods", &["get", "list", "watch", "create", "delete"], &[]),
        rule("", "services", &["create"], &[]),
        rule("", "services", &["get"], &[&master]),
        rule("batch", "jobs", &["get", "patch"], &[&master]),
        rule(leases, "leases", &["create"], &[]),
        rule(leases, "leases", &["get", "update"], &[job]),
    ]
}

/// A rule for the objects with these names, or for all.
fn rule(group: &str, resource: &str, verbs: &[&str], names: &[&str]) -> PolicyRule {
    let owned = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
    PolicyRule {
        api_groups: Some(vec![group.into()]),
        resources: Some(vec![resource.into()]),
        resource_names: (!names.is_empty()).then(|| owned(names)),
        verbs: owned(verbs),
        non_resource_urls: None,
    }
}

const GROUP: &str = "rbac.authorization.k8s.io";
