//! Which gang each pod of a job belongs to. Pure.
//!
//! A gang begins with the first of its pods. Pods that replace others join it. When all have gone,
//! it is over, and the next pod begins another one. Where a gang has a fixed size, a replacement
//! waits until the scheduler does not count its predecessor any more: until that has failed, or its
//! object is gone.
//!
//! **Invariant:** a gang of fixed size never has more pods than that.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use k8s_openapi::api::core::v1::Pod;

use super::{PodAction, PodRef, PodTracker};
use crate::job::LaunchId;
use crate::kube::gang::{GangOptions, gang_name, gang_of};

/// The gang of a job.
#[derive(Debug, Default)]
pub(super) struct Gangs {
    options: Option<GangOptions>,
    job: String,
    min_workers: u32,
    current: Option<Gang>,
    /// Launches that wait for a place in the gang.
    deferred: VecDeque<LaunchId>,
}

/// A gang that has pods.
#[derive(Debug)]
struct Gang {
    name: String,
    places: BTreeMap<LaunchId, Place>,
}

/// A pod that counts as a member of its gang.
#[derive(Debug, Default)]
struct Place {
    /// Uid of the pod, once it is known.
    uid: Option<String>,
    /// Whether the launch has ended. Its pod may still count.
    has_ended: bool,
}

/// Where a pod belongs.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Placement {
    /// To no gang.
    Alone,
    /// To the gang of this name.
    In(String),
    /// To the gang, once a place is free.
    Later,
}

impl Gangs {
    pub(super) fn new(options: Option<GangOptions>, job: &str, min_workers: u32) -> Self {
        Self { options, job: job.into(), min_workers, ..Self::default() }
    }

    /// Places the pod of a launch.
    pub(super) fn place(&mut self, launch: LaunchId, slot: u32) -> Placement {
        let Some(options) = &self.options else { return Placement::Alone };
        if !options.has_gang(slot < self.min_workers) {
            return Placement::Alone;
        }
        let most = options.gang_pods_max().map_or(usize::MAX, |most| most as usize);
        let gang = self.current.get_or_insert_with(|| Gang {
            name: gang_name(&self.job, launch),
            places: BTreeMap::new(),
        });
        if gang.places.len() >= most && !gang.places.contains_key(&launch) {
            self.deferred.push_back(launch);
            return Placement::Later;
        }
        gang.places.entry(launch).or_default();
        Placement::In(gang.name.clone())
    }

    /// Notes a pod of an earlier master.
    pub(super) fn adopt(&mut self, launch: LaunchId, pod: &Pod) {
        let Some(name) = gang_of(pod).filter(|_| self.options.is_some()) else { return };
        let gang =
            self.current.get_or_insert_with(|| Gang { name: name.into(), places: BTreeMap::new() });
        if gang.name == name {
            let place = Place { uid: pod.metadata.uid.clone(), has_ended: false };
            gang.places.insert(launch, place);
        }
    }

    /// Whether the pods of ended launches still count.
    fn has_fixed_size(&self) -> bool {
        self.options.as_ref().is_some_and(|options| options.gang_pods_max().is_some())
    }

    fn place_of(&mut self, launch: LaunchId) -> Option<&mut Place> {
        self.current.as_mut()?.places.get_mut(&launch)
    }

    /// Frees the place of a launch. Returns the launches that wait for one, and the name of the
    /// gang if it is over.
    fn free(&mut self, launch: LaunchId) -> (Vec<LaunchId>, Option<String>) {
        let Some(gang) = &mut self.current else { return Default::default() };
        if gang.places.remove(&launch).is_none() {
            return Default::default();
        }
        let is_over = gang.places.is_empty();
        let over = if is_over { self.current.take().map(|gang| gang.name) } else { None };
        (self.deferred.drain(..).collect(), over)
    }
}

impl PodTracker {
    /// Notes the uid of a launch's pod.
    pub(super) fn note_gang_pod(&mut self, launch: LaunchId, uid: &str) {
        if let Some(place) = self.gangs.place_of(launch) {
            place.uid = Some(uid.into());
        }
    }

    /// Notes that a launch has ended. `pod`: its pod, if that still exists.
    pub(super) fn leave_gang(&mut self, launch: LaunchId, pod: Option<PodRef>) {
        self.gangs.deferred.retain(|deferred| *deferred != launch);
        let keeps_place = self.gangs.has_fixed_size() && pod.is_some();
        match self.gangs.place_of(launch) {
            Some(place) if keeps_place => place.has_ended = true,
            _ => self.free_place(launch),
        }
    }

    /// Frees places of pods that the scheduler does not count any more, and deletes those that it
    /// would count for ever: pods that have succeeded.
    pub(super) fn observe_gang_pod(&mut self, pod: &Pod, is_deleted: bool) {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        let Some(launch) = self.gang_launch_of(pod) else { return };
        let has_ended = self.gangs.place_of(launch).is_some_and(|place| place.has_ended);
        if is_deleted || phase == Some("Failed") {
            self.free_place(launch);
        } else if has_ended
            && phase == Some("Succeeded")
            && pod.metadata.deletion_timestamp.is_none()
        {
            self.actions.push_back(PodAction::Delete(PodRef::of(pod)));
        }
    }

    /// Frees places whose pods are missing from a list of all pods.
    pub(super) fn observe_gang_list(&mut self, uids: &BTreeSet<String>) {
        let places = self.gangs.current.iter().flat_map(|gang| &gang.places);
        let is_gone = |place: &Place| {
            place.has_ended && place.uid.as_ref().is_some_and(|uid| !uids.contains(uid))
        };
        let gone: Vec<LaunchId> =
            places.filter(|(_, place)| is_gone(place)).map(|(&launch, _)| launch).collect();
        gone.into_iter().for_each(|launch| self.free_place(launch));
    }

    /// The launch whose place this pod has.
    fn gang_launch_of(&self, pod: &Pod) -> Option<LaunchId> {
        let uid = pod.metadata.uid.as_ref()?;
        if !self.gangs.has_fixed_size() {
            return None;
        }
        let places = &self.gangs.current.as_ref()?.places;
        places.iter().find(|(_, place)| place.uid.as_ref() == Some(uid)).map(|(&id, _)| id)
    }

    fn free_place(&mut self, launch: LaunchId) {
        let (next, over) = self.gangs.free(launch);
        self.actions.extend(over.map(PodAction::DeleteGroup));
        for launch in next {
            // It is placed again, and waits on if there is no place for it.
            self.create(launch);
        }
    }
}

#[cfg(test)]
mod tests;
