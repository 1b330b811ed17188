"""Kubernetes: an Indexed Job, the Service that names its first pod, and the run file in a ConfigMap."""

from __future__ import annotations

import json
import textwrap

from phalanx.launch.jobs.job import PORT, SAVING_SECONDS, ClusterJob
from phalanx.launch.jobs.volume import WORK, job_environment, require_options
from phalanx.spec.errors import EXIT_STOPPED, UserError

RUN_FOLDER = "/etc/phalanx"
RUN_FILE = "run.toml"
MAX_NAME_LENGTH = 52
"""Maximum length of a Job's name. The host names of its pods, with an index appended, then have at most 63 characters.
"""
FAILURES_PER_NODE = 6
"""Maximum failures per node: Kubernetes' default for a full Job, in which every pod fails when the run fails."""
SHARED_MEMORY = "8Gi"
"""Maximum shared memory between the ranks of a node: the value that AMD's Primus requires of a node before training."""
JOIN_TIMEOUT_SECONDS = 24 * 60 * 60
"""Timeout for other pods, which start when capacity is available or a node has been repaired."""

TEMPLATE = """\
# Written by: {command_line}
# Start the run with kubectl apply -f FILE (Kubernetes 1.31 or newer). The image must contain `phalanx`. Relative paths
# in the run file, such as those of text and run directories, start at the root of the volume.
apiVersion: v1
kind: ConfigMap
metadata:
  name: {quoted_name}
data:
  {run_file}: |
{run_text}
---
apiVersion: v1
kind: Service  # gives each pod a host name; the rendezvous is on the first pod, {name}-0.{name}
metadata:
  name: {quoted_name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    batch.kubernetes.io/job-name: {quoted_name}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {quoted_name}
spec:
  completionMode: Indexed
  completions: {num_nodes}
  parallelism: {num_nodes}
{success_policy}\
  backoffLimit: {max_failures}  # failed pods; a failure of the run counts once per pod
  podFailurePolicy:
    rules:
      - action: FailJob  # an error in the run, which a restart does not fix
        onExitCodes: {{containerName: train, operator: In, values: [2]}}
{user_error_rule}\
      - action: Ignore  # stopped by a signal after a checkpoint: the pod is restarted
        onExitCodes: {{containerName: train, operator: In, values: [{stopped_code}]}}
      - action: Ignore  # the node was drained or lost
        onPodConditions: [{{type: DisruptionTarget, status: "True"}}]
  template:
    spec:
      subdomain: {quoted_name}
      restartPolicy: Never  # required by podFailurePolicy; the Job starts new pods
      terminationGracePeriodSeconds: {grace_seconds}  # time to save a checkpoint
      volumes:
        - name: run
          configMap: {{name: {quoted_name}}}
        - name: work
          persistentVolumeClaim: {{claimName: {volume}}}
        - name: shared-memory  # for the ranks of a node; container runtimes provide only 64 MB
          emptyDir: {{medium: Memory, sizeLimit: {shared_memory}}}
{check}\
      containers:
        - name: train
          command: {command}
{container_fields}"""

SUCCESS_POLICY = """\
  successPolicy:  # the Job is complete when the first pod has succeeded
    rules: [{succeededIndexes: "0"}]
"""

FAIL_ON_USER_ERROR = """\
      - action: FailJob  # an error in the run, found before training
        onExitCodes: {containerName: check, operator: In, values: [2]}
"""

CHECK_CONTAINER = """\
      initContainers:
        - name: check  # phalanx doctor exits with 2 for a node that must be repaired
          command:
            - sh
            - -c
            - |
              # An error in the run file is not a fault of the node: exit with 2.
              phalanx train "$@" {config_args} > /dev/null || exit
              phalanx doctor "$@" --quick
              [ $? -ne 2 ] || {{ echo "phalanx: exclude this node with: kubectl cordon $NODE_NAME" >&2; exit 1; }}
            - doctor
          args: {args}
{container_fields}"""

CONTAINER_FIELDS = """\
          image: {image}
          workingDir: {work}
          env:
            - name: NODE_NAME
              valueFrom: {{fieldRef: {{fieldPath: spec.nodeName}}}}
{variables}\
          volumeMounts:
            - {{name: run, mountPath: {run_folder}}}
            - {{name: work, mountPath: {work}}}
            - {{name: shared-memory, mountPath: /dev/shm}}
          resources:
            requests: {resources}
            limits: {resources}
"""


def kubernetes(job: ClusterJob, image: str | None = None, volume: str | None = None) -> str:
    """Return the job file for Kubernetes.

    `volume` is the claim of a volume that all nodes can write to. Raises UserError if an option is missing, or a path
    is not on the volume.
    """
    required = {
        "--image": (image, "a container image that contains phalanx"),
        "--volume": (volume, "a PersistentVolumeClaim (ReadWriteMany) for text and checkpoints"),
    }
    image, volume = require_options(required)
    # The name of the run as a host name (RFC 1035).
    name = job.run.name.lower().replace(".", "-").replace("_", "-").rstrip("-")
    if len(name) > MAX_NAME_LENGTH or not name[0].isalpha():
        problem = f"must start with a letter and have at most {MAX_NAME_LENGTH} characters, as a name in Kubernetes"
        raise UserError("name", job.run.name, problem, "choose another name with --set name=...")
    run = f"{RUN_FOLDER}/{RUN_FILE}"
    resources = {
        **({"nvidia.com/gpu": str(job.gpus)} if job.gpus else {}),
        **({"cpu": str(job.cpus)} if job.cpus else {}),
        **({"memory": f"{job.memory}Gi"} if job.memory else {}),
    }
    variables = job_environment(job)
    if job.max_nodes > 1 and "rendezvous_timeout_seconds" not in job.run.recovery.model_fields_set:
        reason = "pods may have to wait for free nodes"
        variables["PHALANX_RECOVERY__RENDEZVOUS_TIMEOUT_SECONDS"] = (str(JOIN_TIMEOUT_SECONDS), reason)
    env_lines = "".join(
        f"            - {{name: {key}, value: {_quote_text(value)}}}  # {comment}\n"
        for key, (value, comment) in variables.items()
    )
    container_fields = CONTAINER_FIELDS.format(
        image=json.dumps(image), work=WORK, variables=env_lines, run_folder=RUN_FOLDER, resources=json.dumps(resources)
    )
    check = ""
    if job.check:
        config = " ".join(job.config_args)
        args = _format_args(run, *job.check_args)
        check = CHECK_CONTAINER.format(config_args=config, args=args, container_fields=container_fields)
    rendezvous_args = job.rendezvous_args(f"{name}-0.{name}:{PORT}")
    return TEMPLATE.format(
        command_line=job.command,
        name=name,
        quoted_name=json.dumps(name),
        run_file=RUN_FILE,
        run_text=textwrap.indent(job.file.read_text().strip(), "    ", lambda line: True),
        num_nodes=job.max_nodes,
        success_policy=SUCCESS_POLICY if job.min_nodes < job.max_nodes else "",
        max_failures=FAILURES_PER_NODE * job.max_nodes,
        user_error_rule=FAIL_ON_USER_ERROR if job.check else "",
        stopped_code=EXIT_STOPPED,
        grace_seconds=SAVING_SECONDS,
        volume=json.dumps(volume),
        shared_memory=SHARED_MEMORY,
        check=check,
        command=_format_args("phalanx", "train", run, *rendezvous_args, *job.train_args),
        container_fields=container_fields,
    )


def _quote_text(text: str) -> str:
    """Escape a text for Kubernetes, which expands $(NAME) in arguments and values, and reads $$ as $."""
    return json.dumps(text.replace("$", "$$"))


def _format_args(*args: str) -> str:
    return f"[{', '.join(map(_quote_text, args))}]"
