//! Devices and who serves them: the declarations of every plugin against a device, real or only named.
//!
//! Device 0 is the CPU of this process, which is the host's own; the others are what loaded plugins offer, numbered
//! by each plugin. A device that is only named (`sm_120`) is judged the same way, so that what a package serves can be
//! asked on any machine. Owns no rule: that is [`crate::arch`].

use serde::Serialize;

use structures_plugin_api::describe::FormDecl;

use crate::arch::{self, Device};
use crate::code::Code;
use crate::plugin::Plugin;
use crate::registry::{Outcome, PluginRow, Registry};

/// One device, and each plugin's answer to it.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceRow {
    /// Number by which it is addressed, of the plugin that offers it; absent for one that is only named.
    pub id: Option<u32>,
    /// `cpu`, `gpu`, or what the plugin says (`simulated`, ...).
    pub kind: String,
    /// What the machine calls it.
    pub name: String,
    /// The device in the words of a declaration.
    pub archs: Vec<String>,
    /// Its memory, where it is known.
    pub memory_bytes: Option<u64>,
    /// Who offers it; the host's own has nobody.
    pub plugin: Option<String>,
    /// It is only named.
    pub simulated: bool,
    /// What each plugin's declaration says about it.
    pub plugins: Vec<Admission>,
}

/// What one plugin's declaration says about one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Admission {
    /// Its id.
    pub plugin: String,
    /// Everything it declares; empty: it serves what it can load on.
    pub declares: Vec<String>,
    /// Whether it serves the device.
    pub admitted: bool,
    /// How many of its forms it has code for there: a form may narrow what the plugin declares.
    pub forms_served: usize,
    /// How many forms it declares.
    pub forms: usize,
    /// Why not.
    pub code: Option<Code>,
    /// Why not: the package, what it declares, the device.
    pub reason: Option<String>,
}

/// A plugin that could not say which devices it has: a driver that is not there, mostly.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NoDevices {
    /// Its id.
    pub plugin: String,
    /// Its code.
    pub code: String,
    /// Why, in its words.
    pub reason: String,
}

/// The loaded plugins that could not say which devices they have.
pub fn without_devices(registry: &Registry) -> Vec<NoDevices> {
    let asked = registry.loaded().iter();
    asked
        .filter_map(|plugin| {
            let e = plugin.devices().err()?;
            Some(NoDevices {
                plugin: plugin.id().into(),
                code: e.code,
                reason: e.message,
            })
        })
        .collect()
}

/// The CPU of this process, what the loaded plugins offer, then the named devices.
pub fn devices(registry: &Registry, named: &[Device]) -> Vec<DeviceRow> {
    let mut rows = vec![own(&registry.plugins)];
    for plugin in registry.loaded() {
        rows.extend(offered(plugin));
    }
    rows.extend(named.iter().map(|d| simulated(&registry.plugins, d)));
    rows
}

fn own(plugins: &[PluginRow]) -> DeviceRow {
    let cpu = Device::host_cpu();
    DeviceRow {
        id: Some(0),
        kind: kind(&cpu).into(),
        name: cpu_name(),
        archs: vec![cpu.arch()],
        memory_bytes: memory(),
        plugin: None,
        simulated: false,
        plugins: admissions(plugins, &cpu),
    }
}

fn simulated(plugins: &[PluginRow], device: &Device) -> DeviceRow {
    DeviceRow {
        id: None,
        kind: kind(device).into(),
        name: "named by the caller".into(),
        archs: vec![device.arch()],
        memory_bytes: None,
        plugin: None,
        simulated: true,
        plugins: admissions(plugins, device),
    }
}

/// Devices one plugin offers: only it serves them. One that cannot say has none; [`without_devices`] says why.
fn offered(plugin: &Plugin) -> Vec<DeviceRow> {
    let list = plugin.devices().unwrap_or_default();
    let description = plugin.description();
    list.iter()
        .map(|info| {
            let declares = match info.built_for.is_empty() {
                true => description.archs.clone(),
                false => info.built_for.clone(),
            };
            let answer = match crate::device::parse(&info.arch) {
                Ok(device) => admission(plugin.id(), &declares, &description.forms, &device),
                Err(why) => Admission {
                    plugin: plugin.id().into(),
                    declares,
                    admitted: false,
                    forms_served: 0,
                    forms: description.forms.len(),
                    code: Some(Code::ArchMalformed),
                    reason: Some(format!("plugin {} names a device {why}", plugin.id())),
                },
            };
            DeviceRow {
                id: Some(info.index),
                kind: info.kind.clone(),
                name: info.name.clone(),
                archs: vec![info.arch.clone()],
                memory_bytes: Some(info.memory_bytes).filter(|bytes| *bytes > 0),
                plugin: Some(plugin.id().into()),
                simulated: info.kind == "simulated",
                plugins: vec![answer],
            }
        })
        .collect()
}

fn kind(device: &Device) -> &'static str {
    match device {
        Device::Cpu { .. } => "cpu",
        Device::Sm { .. } => "gpu",
    }
}

/// Plugins that were loaded, and those that fell only because of a device.
fn admissions(plugins: &[PluginRow], device: &Device) -> Vec<Admission> {
    plugins
        .iter()
        .filter(|p| p.outcome == Outcome::Loaded || p.code == Some(Code::ArchNotDeclared))
        .filter_map(|p| {
            let forms = p.description.as_ref().map_or(&[][..], |d| &d.forms);
            Some(admission(p.id.as_deref()?, &p.archs, forms, device))
        })
        .collect()
}

fn admission(plugin: &str, declares: &[String], forms: &[FormDecl], device: &Device) -> Admission {
    let refusal = arch::admit(plugin, declares, Some(device)).err();
    let serves = |form: &&FormDecl| arch::admit(plugin, &form.archs, Some(device)).is_ok();
    let forms_served = match refusal {
        Some(_) => 0,
        None => forms.iter().filter(serves).count(),
    };
    Admission {
        plugin: plugin.into(),
        declares: declares.to_vec(),
        admitted: refusal.is_none(),
        forms_served,
        forms: forms.len(),
        code: refusal.as_ref().map(|r| r.code),
        reason: refusal.map(|r| r.reason),
    }
}

fn cpu_name() -> String {
    field("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.into())
}

fn memory() -> Option<u64> {
    let text = field("/proc/meminfo", "MemTotal")?;
    text.strip_suffix("kB")?
        .trim()
        .parse::<u64>()
        .ok()
        .map(|kib| kib * 1024)
}

/// The value of the first `name: value` line.
fn field(file: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_string())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(id: &str, archs: &[&str], outcome: Outcome, code: Option<Code>) -> PluginRow {
        PluginRow {
            id: Some(id.into()),
            version: None,
            vendor: None,
            api: None,
            path: "/x.so".into(),
            sha256: None,
            outcome,
            code,
            reason: None,
            archs: archs.iter().map(|a| (*a).to_string()).collect(),
            forms: 0,
            signature: None,
            sidecar: false,
            quarantine: None,
            description: None,
            steps: Vec::new(),
        }
    }

    #[test]
    fn every_plugin_answers_every_device() {
        let refused = Some(Code::ArchNotDeclared);
        let rows = [
            row("here", &[std::env::consts::ARCH], Outcome::Loaded, None),
            row("gpu", &["sm_90", "sm_120a"], Outcome::Loaded, None),
            row("legacy", &[], Outcome::Loaded, None),
            row("elsewhere", &["riscv64"], Outcome::Refused, refused),
            row("broken", &[], Outcome::Refused, Some(Code::BadDescribe)),
        ];
        let named = Device::parse("sm_120").expect("device");
        let devices = [own(&rows), simulated(&rows, &named)];
        let admitted = |d: &DeviceRow| -> Vec<(String, bool)> {
            d.plugins
                .iter()
                .map(|p| (p.plugin.clone(), p.admitted))
                .collect()
        };
        let expect = |list: [(&str, bool); 4]| list.map(|(id, yes)| (id.to_string(), yes)).to_vec();
        assert_eq!(
            admitted(&devices[0]),
            expect([
                ("here", true),
                ("gpu", false),
                ("legacy", true),
                ("elsewhere", false)
            ])
        );
        assert_eq!(
            admitted(&devices[1]),
            expect([
                ("here", false),
                ("gpu", true),
                ("legacy", true),
                ("elsewhere", false)
            ])
        );
        assert_eq!((devices[0].id, devices[1].id), (Some(0), None));
        let reason = devices[1].plugins[3].reason.clone().unwrap_or_default();
        for fact in ["elsewhere", "riscv64", "sm_120"] {
            assert!(reason.contains(fact), "{reason}");
        }
        assert!(devices[0].memory_bytes.is_some_and(|b| b > 1 << 20));
    }
}
